// Puts emulated kernels in front of every CUDA kernel of torch's own operators.
#include <memory>
#include <utility>

#include "operator.h"

namespace emulated {
namespace {

// Left as they are: only host code, or a value for the host that is read by emulated copies.
const std::set<std::string> kAsTheyAre = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::set_", "aten::set_.source_Storage",
    "aten::set_.source_Tensor", "aten::set_.source_Storage_storage_offset", "aten::resize_", "aten::resize_as_",
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::view.dtype",
    "aten::record_stream", "aten::_local_scalar_dense", "aten::is_set_to", "aten::is_pinned", "aten::_pin_memory",
    "aten::_efficientzerotensor", "aten::_has_same_storage_numel",
};

const std::set<std::string> kReadsData = {
    "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
    "aten::unique_consecutive", "aten::unique_dim", "aten::unique_dim_consecutive", "aten::bincount",
    "aten::repeat_interleave.Tensor", "aten::histc",
};

// Random operators without a generator among their arguments.
const std::set<std::string> kRandom = {"aten::native_dropout"};

using Way = void (*)(const Operator&, c10::DispatchKeySet, Stack*);

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(const Operator* op, Way way) : op_(op), way_(way) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) { way_(*op_, keys, stack); }

 private:
  const Operator* op_;
  Way way_;
};

void call_reading(const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  if (emulated_is_mute()) return op.real.callBoxed(op.handle, keys, stack);
  call_data_dependent(op, stack);
}

template <class Function>
void find_in(const std::map<std::string, Function>& entries, const std::string& name, Function& place) {
  const auto found = entries.find(name);
  if (found != entries.end()) place = found->second;
}

Operator* make_operator(const c10::OperatorHandle& handle, const std::string& name) {
  auto* const op = new Operator{handle, handle.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA), name};
  for (const auto& argument : handle.schema().arguments()) {
    op->is_written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    op->is_random |= argument.name() == "generator";
  }
  op->is_random |= kRandom.count(name) != 0;
  op->may_index_in_32_bits = may_index_in_32_bits(name);
  op->reads_data = kReadsData.count(name) != 0;
  find_in(attention_numbers(), name, op->numbers);
  find_in(norm_numbers(), name, op->numbers);
  find_in(product_numbers(), name, op->numbers);
  find_in(attention_results(), name, op->make_results);
  find_in(product_results(), name, op->make_results);
  find_in(attention_scratch_bytes(), name, op->scratch_bytes);
  return op;
}

void put(torch::Library& library, const c10::OperatorHandle& handle, const std::string& name, Way way) {
  auto kernel = std::make_unique<Kernel>(make_operator(handle, name), way);
  const std::string local_name = name.substr(name.find("::") + 2);
  library.impl(local_name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

Way way_of(const std::string& name, bool is_random) {
  if (name == "aten::copy_") return call_copy;
  if (kReadsData.count(name) != 0) return call_reading;
  return is_random ? call_random : call_plain;
}

void install() {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto* const library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& found : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CUDA)) {
    const auto handle = dispatcher.findOp(found);
    const std::string name = c10::toString(found);
    if (!handle || !handle->hasSchema() || name.rfind("aten::", 0) != 0) continue;
    if (emulated_poisons() && (name == "aten::empty.memory_format" || name == "aten::empty_strided")) {
      put(*library, *handle, name, call_poisoned_empty);
    } else if (kAsTheyAre.count(name) == 0 && computes(handle->schema())) {
      const bool is_random = handle->schema().argumentIndexWithName("generator") || kRandom.count(name) != 0;
      put(*library, *handle, name, way_of(name, is_random));
    }
  }
  // It has one kernel for all devices, so it is not in the list above.
  put(*library, *dispatcher.findOp({"aten::copy_", ""}), "aten::copy_", call_copy);
}

}  // namespace

bool computes(const c10::FunctionSchema& schema) {
  bool makes = false;
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return false;
    makes |= result.alias_info() == nullptr;
  }
  for (const auto& argument : schema.arguments()) {
    makes |= argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  }
  return makes;
}

}  // namespace emulated

extern "C" __attribute__((visibility("default"))) void emulated_install_operators() {
  // torch warns about every kernel that is put in front of another.
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  emulated::install();
  emulated::observe_the_host();
}
