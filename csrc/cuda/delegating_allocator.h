// A CUDA allocator that forwards every call to another allocator. It contains only torch's interface.
//
// The interface grows with torch's minor versions. A method that is not overridden here would run its default instead
// of the native allocator's method. So unknown versions are refused.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/headeronly/version.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define MEMO_TORCH_IS(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
#if !MEMO_TORCH_IS(2, 11) || MEMO_TORCH_IS(2, 16)
#error "memo knows the CUDA allocators of torch 2.11 to 2.15"
#endif

namespace memo {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;

class DelegatingAllocator : public caching::CUDAAllocator {
 public:
  explicit DelegatingAllocator(caching::CUDAAllocator* native) : native_(native) {}

  // c10::Allocator
  c10::DataPtr allocate(size_t n) override { return native_->allocate(n); }
  c10::DeleterFnPtr raw_deleter() const override { return native_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t n) const override { native_->copy_data(to, from, n); }

  // c10::DeviceAllocator
  bool initialized() override { return native_->initialized(); }
  void emptyCache(MempoolId_t pool) override { native_->emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return native_->getDeviceStats(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override { native_->resetAccumulatedStats(device); }
  void resetPeakStats(DeviceIndex device) override { native_->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override { return native_->getMemoryInfo(device); }

  // CUDAAllocator: memory
  void* raw_alloc(size_t n) override { return native_->raw_alloc(n); }
  void* raw_alloc_with_stream(size_t n, cudaStream_t stream) override { return native_->raw_alloc_with_stream(n, stream); }
  void raw_delete(void* block) override { native_->raw_delete(block); }
  using caching::CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    native_->recordStream(block, stream);
  }
  void* getBaseAllocation(void* block, size_t* size) override { return native_->getBaseAllocation(block, size); }
  caching::ShareableHandle shareIpcHandle(void* block) override { return native_->shareIpcHandle(block); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return native_->getIpcDevPtr(std::move(handle)); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t n, cudaStream_t stream,
                          bool is_p2p_enabled) override {
    return native_->memcpyAsync(to, to_device, from, from_device, n, stream, is_p2p_enabled);
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override { native_->enablePeerAccess(device, peer); }

  // CUDAAllocator: state
  void init(int device_count) override { native_->init(device_count); }
  std::string name() override { return native_->name(); }  // torch compares with "native"
  double getMemoryFraction(DeviceIndex device) override { return native_->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, DeviceIndex device) override { native_->setMemoryFraction(fraction, device); }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return native_->getExpandableSegmentSizes(device);
  }
  void enable(bool is_on) override { native_->enable(is_on); }
  bool isEnabled() const override { return native_->isEnabled(); }
  void cacheInfo(DeviceIndex device, size_t* largest) override { native_->cacheInfo(device, largest); }

  // CUDAAllocator: pools and graphs
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    native_->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override { native_->endAllocateToPool(device, pool); }
  void releasePool(DeviceIndex device, MempoolId_t pool) override { native_->releasePool(device, pool); }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override { return native_->getPoolUseCount(device, pool); }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, std::shared_ptr<CUDAAllocator> allocator) override {
    native_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool is_on) override {
    native_->setUseOnOOM(device, pool, is_on);
  }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override { native_->setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return native_->checkPoolLiveAllocations(device, pool, expected);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    return native_->getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(DeviceIndex device,
                                                  std::shared_ptr<caching::AllocatorState> state) override {
    return native_->setCheckpointPoolState(device, std::move(state));
  }

  // CUDAAllocator: history and observers
  caching::SnapshotInfo snapshot(MempoolId_t pool, bool has_traces) override {
    return native_->snapshot(pool, has_traces);
  }
  bool isHistoryEnabled() override { return native_->isHistoryEnabled(); }
  void recordHistory(bool is_on, caching::CreateContextFn recorder, size_t max_entries, caching::RecordContext when,
                     bool clears, const std::vector<std::string>& skipped) override {
    native_->recordHistory(is_on, recorder, max_entries, when, clears, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& notes) override {
    native_->recordAnnotation(notes);
  }
  void pushCompileContext(std::string& context) override { native_->pushCompileContext(context); }
  void popCompileContext() override { native_->popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { native_->setUserMetadata(metadata); }
  std::string getUserMetadata() override { return native_->getUserMetadata(); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    native_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    native_->attachAllocatorTraceTracker(std::move(tracker));
  }
#if MEMO_TORCH_IS(2, 12)
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* block) override {
    return native_->getContextForPointer(block);
  }
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    native_->attachOomRejectionObserver(std::move(observer));
  }
#endif
#if MEMO_TORCH_IS(2, 13)
  void markCaptureBegin(DeviceIndex device) override { native_->markCaptureBegin(device); }
  void markCaptureEnd(DeviceIndex device) override { native_->markCaptureEnd(device); }
  c10::DataPtr allocateWithAddress(size_t n, void* address) override {
    return native_->allocateWithAddress(n, address);
  }
#endif
#if MEMO_TORCH_IS(2, 14)
  bool supportsUserMetadata() override { return native_->supportsUserMetadata(); }
  void annotateMemory(const void* block, const std::string& metadata) override {
    native_->annotateMemory(block, metadata);
  }
#endif

 protected:
  caching::CUDAAllocator* const native_;
};

}  // namespace memo
