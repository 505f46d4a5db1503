// An operator of torch whose CUDA kernel is replaced by an emulated one.
//
// A call has three parts. The real kernel's host code runs with launches switched off: its checks, its shapes, its
// requests to the real caching allocator for results and scratch. Then the bytes that the kernel would read and write
// are reported to the race checker. Last, a closure with the same operator over the same memory, on the CPU, is queued
// on the current stream.
#pragma once

#include "tensors.h"

namespace emulated {

// Arguments by the names of the schema, which are clearer than positions and change less between versions of torch.
class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values) : schema_(schema), values_(values) {}

  const c10::IValue& operator[](const char* name) const {
    const auto index = schema_.argumentIndexWithName(name);
    TORCH_CHECK(index, schema_.name(), " has no argument ", name);
    return values_[static_cast<size_t>(*index)];
  }
  at::Tensor tensor(const char* name) const { return (*this)[name].toTensor(); }
  // Undefined if it is None.
  at::Tensor optional_tensor(const char* name) const {
    const c10::IValue& value = (*this)[name];
    return value.isTensor() ? value.toTensor() : at::Tensor();
  }
  std::optional<double> optional_double(const char* name) const {
    const c10::IValue& value = (*this)[name];
    return value.isNone() ? std::nullopt : std::optional<double>(value.toDouble());
  }

 private:
  const c10::FunctionSchema& schema_;
  c10::ArrayRef<c10::IValue> values_;  // they outlive this object
};

// Computes an operator's results from arguments on the CPU if torch has no CPU kernel or one with other results. The
// last results may be missing if they have no meaning on CUDA either.
using Numbers = std::function<Stack(const Arguments&)>;

// Replaces host code that cannot run here: makes results on the device, whose content the closure computes.
using MakeResults = std::function<Stack(const Arguments&)>;

// Bytes that such host code requests from the caching allocator besides results; freed after the call is queued.
using ScratchBytes = std::function<int64_t(const Arguments&)>;

struct Operator {
  c10::OperatorHandle handle;
  c10::SafeKernelFunction real;  // the CUDA kernel behind the emulated one
  std::string name;
  std::vector<bool> is_written;  // by argument
  Numbers numbers;               // empty: the operator's CPU kernel
  MakeResults make_results;      // empty: the real host code
  ScratchBytes scratch_bytes;    // empty: none, or the real host code requests them
  bool reads_data = false;       // its result, or the shape of it, depends on the data: the host has to wait
  bool is_random = false;
  bool may_index_in_32_bits = false;

  const c10::FunctionSchema& schema() const { return handle.schema(); }
};

// While it lives, the calling thread's launches, copies and fills do nothing.
struct Mute {
  Mute() { emulated_mute(1); }
  ~Mute() { emulated_mute(-1); }
};

// While it lives, the thread's operators go to CPU kernels at once, without autograd, autocast, modes, Python or
// observers in between, whatever the thread was doing when it came to run a closure.
struct PlainDispatch {
  at::RecordFunctionGuard unobserved{/*is_enabled=*/false};
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::DispatchKeySet(c10::DispatchKeySet::FULL) -
          c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python)};
};

// Queues compute() as one kernel. An exception from it becomes the process's lasting error.
void queue(void* stream, const Operator& op, std::function<void()> compute, const Access& access, const Load& load);

// The virtual time of an operator.
Load load_of(const Operator& op, const Stack& arguments, const Stack& results);

// Whether an argument is overwritten without being read.
bool is_overwritten(const Operator& op, size_t argument);

// One running call: arguments as given, results as the host code made them.
struct Call {
  Stack arguments;
  Stack results;
  c10::DataPtr scratch;
  Stack on_cpu;  // arguments for the closure, if it has numbers
  void* stream;
  Access access;
  Load load;
  bool has_numbers;  // else its results are absent (emulator.h, kMostRealBytes)
};

Call begin_call(const Operator& op, c10::DispatchKeySet keys, Stack* stack);

// Queues compute() for a call that has numbers. If numbers that it reads are absent when it runs, its results are, too.
void queue_call(const Operator& op, const Call& call, std::function<void()> compute);

// The ways to call an operator; each takes its arguments from the stack and leaves its results there.
void call_plain(const Operator& op, c10::DispatchKeySet keys, Stack* stack);
void call_random(const Operator& op, c10::DispatchKeySet keys, Stack* stack);
void call_data_dependent(const Operator& op, Stack* stack);
void call_copy(const Operator& op, c10::DispatchKeySet keys, Stack* stack);
void call_poisoned_empty(const Operator& op, c10::DispatchKeySet keys, Stack* stack);

// Whether it is an attention kernel that is not known to index in 64 bits.
bool may_index_in_32_bits(const std::string& name);

// Throws if such a kernel takes or returns a tensor whose last element 32 bits do not reach.
void check_reach(const Operator& op, const Stack& values);

// Whether an operator reads or writes elements: views and queries do not.
bool computes(const c10::FunctionSchema& schema);

// From now on reports to the race checker which pinned memory operators of the CPU read and write.
void observe_the_host();

// By operator name.
const std::map<std::string, Numbers>& attention_numbers();
const std::map<std::string, MakeResults>& attention_results();
const std::map<std::string, ScratchBytes>& attention_scratch_bytes();
const std::map<std::string, Numbers>& norm_numbers();
const std::map<std::string, Numbers>& product_numbers();
const std::map<std::string, MakeResults>& product_results();

}  // namespace emulated
