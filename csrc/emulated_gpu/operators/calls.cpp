// How an operator is called: plainly, with results whose shape is in the data, or as a copy.
#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "operator.h"

namespace emulated {
namespace {

// Masks select a number of elements that only the data knows.
bool has_mask(const Operator& op, const Stack& arguments) {
  const auto index = op.schema().argumentIndexWithName("indices");
  if (!index || op.name.rfind("aten::index", 0) != 0 || op.name.rfind("aten::index_put", 0) == 0) return false;
  bool found = false;
  each_tensor(arguments[static_cast<size_t>(*index)], [&found](const at::Tensor& tensor) {
    found |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
  });
  return found;
}

void append_accesses(const Operator& op, Call& call) {
  const auto& declared = op.schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    each_tensor(call.arguments[i], [&](const at::Tensor& tensor) {
      if (op.is_written[i]) append_ranges(tensor, call.access.writes);
      if (!declared[i].is_out()) append_ranges(tensor, call.access.reads);
    });
  }
  for (size_t i = 0; i < call.results.size(); ++i) {
    if (op.schema().returns()[i].alias_info() != nullptr) continue;  // an argument
    each_tensor(call.results[i], [&](const at::Tensor& tensor) { append_ranges(tensor, call.access.writes); });
  }
}

}  // namespace

void queue(void* stream, const Operator& op, std::function<void()> compute, const Access& access) {
  const char* const name = op.name.c_str();  // operators are never destroyed
  Work work = [compute = std::move(compute), name] {
    try {
      const PlainDispatch plain;
      compute();
    } catch (const std::exception& error) {
      emulated_kernel_failed((std::string(name) + ": " + error.what()).c_str());
    }
    return true;
  };
  emulated_enqueue(stream, name, &work, &access);
}

Call begin_call(const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  Call call;
  const size_t num_arguments = op.schema().arguments().size();
  call.arguments.assign(stack->end() - static_cast<int64_t>(num_arguments), stack->end());
  if (op.make_results) {
    torch::jit::drop(*stack, num_arguments);
    const Stack results = op.make_results(Arguments(op.schema(), call.arguments));
    stack->insert(stack->end(), results.begin(), results.end());
  } else {
    const Mute mute;
    op.real.callBoxed(op.handle, keys, stack);
  }
  call.results.assign(stack->end() - static_cast<int64_t>(op.schema().returns().size()), stack->end());
  call.stream = current_stream(call.arguments, call.results);
  for (const c10::IValue& value : call.arguments) call.on_cpu.push_back(for_closure(value));
  // Factories: memory of the CPU that is not pinned, whatever was asked of CUDA's.
  if (const auto pin = op.schema().argumentIndexWithName("pin_memory")) {
    call.on_cpu[static_cast<size_t>(*pin)] = c10::IValue();
  }
  append_accesses(op, call);
  return call;
}

void call_plain(const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  if (emulated_is_mute()) return op.real.callBoxed(op.handle, keys, stack);
  if (has_mask(op, torch::jit::last(*stack, op.schema().arguments().size()).vec())) {
    return call_data_dependent(op, stack);
  }
  const Call call = begin_call(op, keys, stack);
  Stack places;
  for (size_t i = 0; i < call.results.size(); ++i) {
    const bool is_argument = op.schema().returns()[i].alias_info() != nullptr;
    places.push_back(is_argument ? c10::IValue() : for_closure(call.results[i]));
  }
  const auto compute = [&op, on_cpu = call.on_cpu, places]() mutable {
    Stack computed = std::move(on_cpu);
    if (op.numbers) {
      computed = op.numbers(Arguments(op.schema(), computed));
    } else {
      op.handle.callBoxed(computed);
    }
    for (size_t i = 0; i < std::min(places.size(), computed.size()); ++i) {
      if (!places[i].isNone()) store(places[i], computed[i], op.name);
    }
  };
  queue(call.stream, op, compute, call.access);
}

// The host waits, reads and only then knows how much to allocate, on a GPU as here.
void call_data_dependent(const Operator& op, Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const Stack arguments = torch::jit::last(*stack, num_arguments).vec();
  torch::jit::drop(*stack, num_arguments);
  void* const stream = current_stream(arguments, {});
  emulated_wait_for_stream(stream, op.name.c_str());
  Stack computed;
  for (const c10::IValue& value : arguments) computed.push_back(for_closure(value));
  {
    const PlainDispatch plain;
    op.handle.callBoxed(computed);
  }
  std::optional<c10::Device> device;
  for (const c10::IValue& value : arguments) {
    each_tensor(value, [&device](const at::Tensor& tensor) {
      if (!device && tensor.is_cuda()) device = tensor.device();
    });
  }
  for (size_t i = 0; i < computed.size(); ++i) {
    if (!computed[i].isTensor() || !computed[i].toTensor().defined()) {
      stack->push_back(computed[i]);
      continue;
    }
    if (op.schema().returns()[i].alias_info() != nullptr) {
      stack->push_back(arguments[0]);
      continue;
    }
    const at::Tensor numbers = computed[i].toTensor().contiguous();
    const at::Tensor result = at::empty_strided(numbers.sizes(), numbers.strides(), numbers.options().device(*device));
    Access access;
    append_ranges(result, access.writes);
    const at::Tensor place = view_on_cpu(result);
    queue(stream, op, [place, numbers] { place.copy_(numbers); }, access);
    stack->push_back(result);
  }
}

// Both sides on the device: a kernel. Else the real copy, which waits where CUDA waits.
void call_copy(const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  const Arguments arguments(op.schema(), torch::jit::last(*stack, op.schema().arguments().size()));
  const at::Tensor to = arguments.tensor("self"), from = arguments.tensor("src");
  if (to.is_cuda() && from.is_cuda()) return call_plain(op, keys, stack);
  op.real.callBoxed(op.handle, keys, stack);
}

// Every byte 0xff: NaN in all floating types, -1 in integers.
void call_poisoned_empty(const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  op.real.callBoxed(op.handle, keys, stack);
  const at::Tensor tensor = stack->back().toTensor();
  if (emulated_is_mute() || !tensor.is_cuda() || tensor.numel() == 0) return;
  const size_t num_bytes = tensor.storage().nbytes();
  void* const memory = tensor.storage().mutable_data();
  const Access access{{}, {bytes_at(memory, num_bytes)}};
  queue(current_stream({tensor}, {}), op, [memory, num_bytes] { std::memset(memory, 0xff, num_bytes); }, access);
}

}  // namespace emulated
