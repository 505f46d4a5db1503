// Reports to the race checker what the host's own operators read and write in pinned memory, as they run.
//
// torch calls its observers before each operator that goes through its dispatcher. Of the operators on the CPU, those
// with a CPU kernel touch memory. The rest call such operators; those that only move a tensor elsewhere
// (aten::_to_copy) leave the reading to the device. Accesses outside the dispatcher are not seen: numpy, tolist(), C++.
#include <unordered_map>

#include "operator.h"

namespace emulated {
namespace {

// Operators with a CPU kernel that read no element.
const std::set<std::string> kLooksAtNothing = {
    "aten::is_set_to", "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Tensor",
    "aten::set_.source_Storage_storage_offset", "aten::resize_", "aten::resize_as_", "aten::_has_same_storage_numel",
};

struct HostOperator {
  std::string name;
  bool touches_memory = false;
  std::vector<bool> is_written, is_read;  // by argument
};

HostOperator describe(const c10::OperatorName& name) {
  HostOperator op{c10::toString(name)};
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  if (!handle) return op;
  const bool has_kernel = handle->hasKernelForDispatchKey(c10::DispatchKey::CPU) || op.name == "aten::copy_";
  op.touches_memory = has_kernel && computes(handle->schema()) && kLooksAtNothing.count(op.name) == 0;
  for (const auto& argument : handle->schema().arguments()) {
    op.is_written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    op.is_read.push_back(!argument.is_out());
  }
  return op;
}

// Never destroyed: the checker keeps their names.
const HostOperator& host_operator(const c10::OperatorName& name) {
  thread_local auto* const known = new std::unordered_map<c10::OperatorName, HostOperator>;
  const auto found = known->find(name);
  return found != known->end() ? found->second : known->emplace(name, describe(name)).first->second;
}

std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& call) {
  if (!emulated_checks_races() || emulated_is_mute() || !call.operator_name()) return nullptr;
  const HostOperator& op = host_operator(*call.operator_name());
  if (!op.touches_memory) return nullptr;
  Access access;
  bool is_of_device = false;
  for (size_t i = 0; i < std::min(call.inputs().size(), op.is_read.size()); ++i) {
    each_tensor(call.inputs()[i], [&](const at::Tensor& tensor) {
      is_of_device |= tensor.is_cuda();
      if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) return;
      if (op.is_written[i]) append_elements(tensor, access.writes);
      if (op.is_read[i]) append_elements(tensor, access.reads);
    });
  }
  if (!is_of_device) emulated_use_on_host(op.name.c_str(), &access);
  return nullptr;
}

}  // namespace

void observe_the_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(observe).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace emulated
