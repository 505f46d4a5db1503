// The ways to call an operator: plainly, with results whose shape depends on the data, or as a copy.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>

#include "operator.h"

namespace emulated {
namespace {

// The number of elements that a mask selects depends on the data.
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

// A view of large memory counts as large: the content of the memory was never computed.
bool has_numbers(const at::Tensor& tensor) {
  return !tensor.has_storage() || emulated_has_numbers(tensor.storage().nbytes()) != 0;
}

// Allocates on the current stream, which is the call's.
void take_scratch(const Operator& op, Call& call) {
  const int64_t num_bytes = op.scratch_bytes(Arguments(op.schema(), call.arguments));
  if (num_bytes == 0) return;
  call.scratch = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(num_bytes));
  if (emulated_checks_races()) {
    call.access.writes.push_back(bytes_at(call.scratch.get(), static_cast<size_t>(num_bytes)));
  }
}

bool have_numbers(const Stack& values) {
  bool all = true;
  for (const c10::IValue& value : values) each_tensor(value, [&all](const at::Tensor& t) { all &= has_numbers(t); });
  return all;
}

// All bytes from the first to the last element.
Range hull(const at::Tensor& tensor) {
  return bytes_at(tensor.const_data_ptr(), static_cast<size_t>(last_offset(tensor) + 1) * tensor.itemsize());
}

// The small tensors of a call, on the CPU: those that its closure reads and those that it writes.
struct Small {
  std::vector<Range> reads;
  std::vector<at::Tensor> writes;
  int64_t num_sorted = 0;  // of searchsorted: the values among which it searches for places

  Small(const Operator& op, const Call& call) {
    if (op.name == "aten::searchsorted.Tensor") num_sorted = call.arguments[0].toTensor().size(-1);
    const auto write = [this](const at::Tensor& tensor) {
      if (tensor.is_cuda() && has_numbers(tensor)) writes.push_back(view_on_cpu(tensor));
    };
    for (size_t i = 0; i < call.arguments.size(); ++i) {
      if (op.is_written[i]) each_tensor(call.arguments[i], write);
      if (is_overwritten(op, i)) continue;
      each_tensor(call.arguments[i], [this](const at::Tensor& tensor) {
        if (tensor.is_cuda()) reads.push_back(hull(tensor));
      });
    }
    for (const c10::IValue& result : call.results) each_tensor(result, write);
  }

  // A result whose numbers depend on absent ones is zero. Places among sorted values are equal shares of them, so that
  // each expert of a mixture has rows, and its kernels are started.
  void fill_absent(at::Tensor& result) const {
    if (num_sorted == 0) {
      result.zero_();
    } else {
      result.copy_(at::arange(1, result.numel() + 1).mul(num_sorted).floor_divide(result.numel()).view_as(result));
    }
  }
};

}  // namespace

bool is_overwritten(const Operator& op, size_t argument) {
  static const std::set<std::string> kOverwrites = {"aten::copy_", "aten::zero_", "aten::fill_.Scalar",
                                                    "aten::fill_.Tensor"};
  if (op.schema().arguments()[argument].is_out()) return true;
  return op.is_written[argument] && (op.is_random || kOverwrites.count(op.name) != 0);
}

void queue(void* stream, const Operator& op, std::function<void()> compute, const Access& access, const Load& load) {
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
  emulated_enqueue(stream, name, &work, &access, &load);
}

Call begin_call(const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  Call call;
  const size_t num_arguments = op.schema().arguments().size();
  call.arguments.assign(stack->end() - static_cast<int64_t>(num_arguments), stack->end());
  check_reach(op, call.arguments);
  if (op.make_results) {
    torch::jit::drop(*stack, num_arguments);
    const Stack results = op.make_results(Arguments(op.schema(), call.arguments));
    stack->insert(stack->end(), results.begin(), results.end());
  } else {
    const Mute mute;
    op.real.callBoxed(op.handle, keys, stack);
  }
  call.results.assign(stack->end() - static_cast<int64_t>(op.schema().returns().size()), stack->end());
  check_reach(op, call.results);
  call.stream = current_stream(call.arguments, call.results);
  append_accesses(op, call);
  if (op.scratch_bytes) take_scratch(op, call);
  call.load = load_of(op, call.arguments, call.results);
  call.has_numbers = have_numbers(call.arguments) && have_numbers(call.results);
  if (!call.has_numbers) return call;
  for (const c10::IValue& value : call.arguments) call.on_cpu.push_back(for_closure(value));
  // Factories: memory of the CPU that is not pinned, whatever the call of CUDA's factory requested.
  if (const auto pin = op.schema().argumentIndexWithName("pin_memory")) {
    call.on_cpu[static_cast<size_t>(*pin)] = c10::IValue();
  }
  return call;
}

void queue_call(const Operator& op, const Call& call, std::function<void()> compute) {
  if (emulated_has_numbers(SIZE_MAX)) return queue(call.stream, op, std::move(compute), call.access, call.load);
  const auto run = [small = Small(op, call), has_numbers = call.has_numbers, compute = std::move(compute)] {
    const bool is_absent = !has_numbers || std::any_of(small.reads.begin(), small.reads.end(), [](const Range& range) {
      return emulated_is_absent(&range) != 0;
    });
    if (!is_absent) compute();
    for (at::Tensor tensor : small.writes) {
      if (is_absent) small.fill_absent(tensor);
      const Range range = hull(tensor);
      emulated_set_absent(&range, is_absent);
    }
  };
  queue(call.stream, op, run, call.access, call.load);
}

void call_plain(const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  if (emulated_is_mute()) return op.real.callBoxed(op.handle, keys, stack);
  if (has_mask(op, torch::jit::last(*stack, op.schema().arguments().size()).vec())) {
    return call_data_dependent(op, stack);
  }
  const Call call = begin_call(op, keys, stack);
  if (!call.has_numbers) return queue_call(op, call, {});
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
  queue_call(op, call, compute);
}

// The host waits and reads before it knows how much to allocate, on a GPU as here.
void call_data_dependent(const Operator& op, Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const Stack arguments = torch::jit::last(*stack, num_arguments).vec();
  TORCH_CHECK(have_numbers(arguments), op.name, ": the shape of its result is in its data, which it has not without numbers");
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
    queue(stream, op, [place, numbers] { place.copy_(numbers); }, access, load_of(op, arguments, {result}));
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

}  // namespace emulated
