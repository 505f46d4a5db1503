// Memory is poisoned when it is handed out and when it is given back: every byte 0xff, which is NaN in all floating
// types and -1 in integers. Memory that is read before it is written, or after it is freed, shows in the numbers.
//
// The runtime sees only the segments that torch's caching allocator takes and returns. The blocks inside come from that
// allocator's own trace, which names every request and every return, with the stream that the block belongs to. The
// poison is work on that stream. For a return it comes after all work that was issued on the stream before, like the
// next user's work; an unrecorded kernel on another stream (record_stream) races with it, as with the next user. Blocks
// of an allocator that replaces torch's are not in the trace: they are poisoned only by torch.empty when they are
// handed out, and not when they are returned.
#include <cstring>
#include <mutex>

#include "operator.h"

namespace emulated {
namespace {

void queue_poison(void* stream, const char* name, void* memory, size_t num_bytes) {
  if (num_bytes == 0 || !emulated_has_numbers(num_bytes)) return;
  const Access access{{}, {bytes_at(memory, num_bytes)}};
  Work work = [memory, num_bytes] {
    std::memset(memory, 0xff, num_bytes);
    return true;
  };
  const Load none;
  emulated_enqueue(stream, name, &work, &access, &none);
}

// Called while the allocator's lock is held: nothing of torch may be called.
template <class Entry>
void on_trace(const Entry& entry) {
  const bool is_return = entry.action_ == Entry::FREE_COMPLETED;
  if (!is_return && entry.action_ != Entry::ALLOC) return;
  int before = 0;  // a null stream is the current device's
  (void)cudaGetDevice(&before);
  (void)cudaSetDevice(entry.device_);
  queue_poison(entry.stream_, is_return ? "poison of freed memory" : "poison of new memory",
               reinterpret_cast<void*>(entry.addr_), entry.size_);
  (void)cudaSetDevice(before);
}

}  // namespace

void call_poisoned_empty(const Operator& op, c10::DispatchKeySet keys, Stack* stack) {
  op.real.callBoxed(op.handle, keys, stack);
  const at::Tensor tensor = stack->back().toTensor();
  if (!tensor.is_cuda()) return;
  static std::once_flag once;  // not before the first request, which makes the allocator
  std::call_once(once, [] {
    c10::cuda::CUDACachingAllocator::get()->attachAllocatorTraceTracker([](const auto& entry) { on_trace(entry); });
  });
  if (emulated_is_mute()) return;
  queue_poison(current_stream({tensor}, {}), op.name.c_str(), tensor.storage().mutable_data(), tensor.storage().nbytes());
}

}  // namespace emulated
