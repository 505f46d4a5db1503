// CUDA tensors as the CPU sees them: the same bytes, because device memory is host memory.
#pragma once

#include "../runtime/emulator.h"
#include "torch_headers.h"

namespace emulated {

using torch::jit::Stack;

// The same memory as a CPU tensor, which does not keep it alive. Other tensors are returned as they are.
at::Tensor view_on_cpu(const at::Tensor& tensor);

// An argument for a closure: CUDA tensors by address, CPU tensors by value, as in a launch; the device becomes the CPU.
c10::IValue for_closure(const c10::IValue& value);

// Calls act for each defined tensor in a value: a tensor, a list of them, or neither.
void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& act);

// Elements from the first to the last one, in memory; -1 if there are none.
int64_t last_offset(const at::Tensor& tensor);

// Appends the byte ranges of the elements of a CUDA tensor, if races are checked.
void append_ranges(const at::Tensor& tensor, std::vector<Range>& ranges);

// The same for a tensor of any device.
void append_elements(const at::Tensor& tensor, std::vector<Range>& ranges);

// Copies results of the CPU to the memory that CUDA's host code allocated for them.
void store(const c10::IValue& place, const c10::IValue& computed, const std::string& name);

// The stream of the first CUDA tensor's device that is current for the calling thread.
void* current_stream(const Stack& arguments, const Stack& results);

}  // namespace emulated
