// torch's CUDA caching allocator with a plan over it.
//
// The caching allocator stays below: it holds the arena as one block, serves requests that are not planned, and keeps
// its statistics, snapshots, expandable segments and pools. CUDAPluggableAllocator would lose all of these.
//
// Addresses are used again in the order of one stream, the one that was current when the arena was taken. Requests
// made under another stream are native. If another stream uses a planned block (record_stream), an event of that stream
// is recorded when the block is freed, and the arena's stream waits for it before the address is used again. There is
// no event if the owner has waited for each of these uses and reported it (settle): an event would also cover all later
// work of the other stream. If that work contained a receive posted ahead, a rank would wait for a message that its
// neighbour sends only after an answer.
//
// While an iteration is recorded, managed memory can stand in for the caching allocator (managed_memory.h).
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "../core/control.h"
#include "../core/pending_events.h"
#include "delegating_allocator.h"

namespace memo {
namespace {

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { C10_CUDA_CHECK_WARN(cudaEventDestroy(event)); }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;

// The streams besides the arena's that use a live planned block, from record_stream until all uses are settled.
class OtherStreams {
 public:
  void add(void* block, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Uses& uses = uses_[block];
    ++uses.num_open;
    if (std::find(uses.streams.begin(), uses.streams.end(), stream) == uses.streams.end()) {
      uses.streams.push_back(stream);
    }
    count_.store(uses_.size(), std::memory_order_release);
  }

  // The arena's stream waits for one of the uses. The call does not say which of several streams it was, so all of them
  // count while another use is open.
  void settle(void* block) {
    if (count_.load(std::memory_order_acquire) == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = uses_.find(block);
    if (found == uses_.end() || --found->second.num_open > 0) return;
    uses_.erase(found);
    count_.store(uses_.size(), std::memory_order_release);
  }

  std::vector<cudaStream_t> take(void* block) {
    if (count_.load(std::memory_order_acquire) == 0) return {};  // nearly always
    const std::lock_guard<std::mutex> lock(mutex_);
    auto node = uses_.extract(block);
    count_.store(uses_.size(), std::memory_order_release);
    return node.empty() ? std::vector<cudaStream_t>{} : std::move(node.mapped().streams);
  }

 private:
  struct Uses {
    std::vector<cudaStream_t> streams;
    int64_t num_open = 0;
  };
  std::mutex mutex_;
  std::unordered_map<void*, Uses> uses_;
  std::atomic<size_t> count_{0};
};

// One for each process, never destroyed, for the reason given at core().
struct Device {
  caching::CUDAAllocator* native = nullptr;   // set once, before the first call of a function below
  std::atomic<DeviceIndex> index{-1};         // of the GPU that is planned
  std::atomic<cudaStream_t> stream{nullptr};  // of the arena
  std::atomic<int> num_open_pools{0};         // graphs and user pools have their own memory
  OtherStreams other_streams;
  PendingEvents<Event> pending;

  void wait_for_readers(const void* block, size_t num_bytes) {
    pending.take(block, num_bytes, [this](const Event& event) {
      C10_CUDA_CHECK(cudaStreamWaitEvent(stream.load(), event.get(), 0));
    });
  }
};

Device& device() {
  static auto* const only = new Device;
  return *only;
}

void leave_events_of_streams(void* block) {
  for (cudaStream_t stream : device().other_streams.take(block)) {
    const c10::cuda::CUDAGuard guard(device().index.load());
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    Event owned(event);
    C10_CUDA_CHECK(cudaEventRecord(event, stream));
    device().pending.add(block, core().num_bytes_of(block), std::move(owned));
  }
}

// Records an event of each other stream that uses the block. If CUDA cannot make one, waits for the device instead:
// slow, but the address is used again only after its readers.
void leave_events(void* block) noexcept {
  try {
    leave_events_of_streams(block);
  } catch (const std::exception& error) {
    core().fail(error.what());
    C10_CUDA_CHECK_WARN(cudaDeviceSynchronize());
  }
}

// A block of managed memory if it is open for requests of this size; nullptr: the caller must ask the native allocator.
void* managed_block(size_t num_bytes) {
  const auto answer = managed_memory().ask(num_bytes);
  if (answer == ManagedMemory::Answer::kNative) return nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, answer == ManagedMemory::Answer::kManaged, "managed memory for ", num_bytes,
                   " bytes more would pass the limit");
  void* block = nullptr;
  const cudaError_t error = C10_CUDA_ERROR_HANDLED(cudaMallocManaged(&block, num_bytes, cudaMemAttachGlobal));
  if (error == cudaSuccess) {
    managed_memory().note(block, num_bytes);
    return block;
  }
  (void)cudaGetLastError();
  managed_memory().forgo(num_bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA has no managed memory for ", num_bytes, " bytes: ",
                   cudaGetErrorString(error));
}

// Waits for the whole device, whichever stream still uses the block: recording need not be fast.
void free_managed(void* block) {
  const c10::cuda::CUDAGuard guard(device().index.load());
  C10_CUDA_CHECK_WARN(cudaDeviceSynchronize());
  C10_CUDA_CHECK_WARN(cudaFree(block));
}

// Serves as c10's raw deleter. Finds the owner by the address, so it can free blocks from before install(). Nothing is
// thrown: deleters may run while another exception propagates, and a second one would end the process.
void release_block(void* block) noexcept {
  if (block == nullptr) return;
  try {
    if (core().in_arena(block)) leave_events(block);  // before the address is free
    if (core().release(block)) return;
    if (managed_memory().release(block)) return free_managed(block);
    device().native->raw_deleter()(block);
  } catch (const std::exception& error) {
    core().fail(error.what());
  }
}

class PlannedCudaAllocator final : public DelegatingAllocator {
 public:
  using DelegatingAllocator::DelegatingAllocator;

  c10::DataPtr allocate(size_t num_bytes) override {
    const DeviceIndex current = c10::cuda::current_device();
    const bool may_plan = num_bytes != 0 && current == device().index && device().num_open_pools == 0;
    if (!may_plan) return native_->allocate(num_bytes);
    const auto stream = reinterpret_cast<StreamId>(c10::cuda::getCurrentCUDAStream(current).stream());
    if (void* block = core().request(num_bytes, stream)) {
      try {
        device().wait_for_readers(block, num_bytes);
      } catch (...) {
        core().forgo(block);  // otherwise its place would stay taken
        throw;
      }
      return {block, block, &release_block, c10::Device(c10::DeviceType::CUDA, current)};
    }
    if (void* block = managed_block(num_bytes)) {
      core().note_native(block, num_bytes, stream);
      return {block, block, &release_block, c10::Device(c10::DeviceType::CUDA, current)};
    }
    c10::DataPtr block = native_->allocate(num_bytes);
    core().note_native(block.get(), num_bytes, stream);
    // Lets the recording see the free. The deleter is the native one: the context is the block itself.
    (void)block.compare_exchange_deleter(native_->raw_deleter(), &release_block);
    return block;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void raw_delete(void* block) override { release_block(block); }

  using DelegatingAllocator::recordStream;
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    if (block.get_deleter() != &release_block) return native_->recordStream(block, stream);
    if (core().in_arena(block.get())) {
      if (stream.stream() != device().stream) device().other_streams.add(block.get(), stream.stream());
      return;
    }
    if (managed_memory().has(block.get())) return;  // free_managed() waits for all streams
    // The native allocator ignores blocks whose deleter is not its own.
    const Borrowed lent{{block.get(), block.get(), native_->raw_deleter(), block.device()}};
    native_->recordStream(lent.block, stream);
  }

  void* getBaseAllocation(void* block, size_t* size) override {
    return native_->getBaseAllocation(native_block(block), size);
  }

  caching::ShareableHandle shareIpcHandle(void* block) override {
    TORCH_CHECK(!core().in_arena(block), "a planned block cannot be shared with other processes: clone the tensor "
                "outside of the training iteration first");
    return native_->shareIpcHandle(block);
  }

#if MEMO_TORCH_IS(2, 12)
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* block) override {
    return native_->getContextForPointer(native_block(const_cast<void*>(block)));
  }
#endif
#if MEMO_TORCH_IS(2, 14)
  void annotateMemory(const void* block, const std::string& metadata) override {
    native_->annotateMemory(native_block(const_cast<void*>(block)), metadata);
  }
#endif

  void beginAllocateToPool(DeviceIndex index, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    ++device().num_open_pools;
    native_->beginAllocateToPool(index, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex index, MempoolId_t pool) override {
    native_->endAllocateToPool(index, pool);
    --device().num_open_pools;
  }

 private:
  struct Borrowed {
    c10::DataPtr block;
    ~Borrowed() { (void)block.release_context(); }
  };

  // The block as the native allocator knows it: blocks in the arena are parts of one of its blocks.
  static void* native_block(void* block) { return core().in_arena(block) ? core().arena() : block; }
};

}  // namespace

void install() {
  caching::CUDAAllocator* found = caching::get();
  if (found->name() != "native") {
    throw std::runtime_error("torch's CUDA allocator is '" + found->name() +
                             "', and plans go over 'native': set PYTORCH_ALLOC_CONF without a backend");
  }
  device().native = found;
  caching::allocator.store(new PlannedCudaAllocator(found));  // never destroyed, as core() says
}

char* take_arena(size_t num_bytes) { return static_cast<char*>(device().native->raw_alloc(num_bytes)); }
void give_arena(char* arena, size_t num_bytes) {
  device().wait_for_readers(arena, num_bytes);  // torch's allocator knows the arena's stream alone
  device().native->raw_delete(arena);
}

StreamId bind_stream() {
  const DeviceIndex current = c10::cuda::current_device();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(current).stream();
  device().index = current;
  device().stream = stream;
  return reinterpret_cast<StreamId>(stream);
}

void settle(void* block) {
  if (!core().in_arena(block)) return;
  const cudaStream_t current = c10::cuda::getCurrentCUDAStream(device().index.load()).stream();
  if (current == device().stream.load()) device().other_streams.settle(block);
}

void fill_with_nan(void* block, size_t num_bytes) {
  device().wait_for_readers(block, num_bytes);
  C10_CUDA_CHECK(cudaMemsetAsync(block, 0xff, num_bytes, device().stream.load()));
}

bool has_managed_memory() {
  int is_paged = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&is_paged, cudaDevAttrConcurrentManagedAccess, c10::cuda::current_device()));
  return is_paged != 0;
}

}  // namespace memo
