// torch's CPU allocator with every byte of every thread counted: what is alive, and the most that ever was. A limit may
// be set on what is alive.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

constexpr uint8_t kPriority = 254;  // c10 keeps the allocator with the highest; a planned one may lie above this

c10::Allocator* native = nullptr;  // set once, before the first call of what is below

struct Count {
  std::mutex mutex;
  std::unordered_map<void*, uint64_t> sizes;  // of living blocks; those from before install() are not in it
  uint64_t live_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t limit_bytes = UINT64_MAX;
};

Count& count() {
  static auto* one = new Count;  // never destroyed: tensors may outlive this library's statics
  return *one;
}

void release(void* block) {
  if (block == nullptr) return;
  {
    const std::lock_guard<std::mutex> guard(count().mutex);
    const auto found = count().sizes.find(block);
    if (found != count().sizes.end()) {
      count().live_bytes -= found->second;
      count().sizes.erase(found);
    }
  }
  native->raw_deleter()(block);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    {
      const std::lock_guard<std::mutex> guard(count().mutex);
      TORCH_CHECK_WITH(OutOfMemoryError, num_bytes <= count().limit_bytes - std::min(count().live_bytes, count().limit_bytes),
                       "out of memory: tried to allocate ", num_bytes, " bytes where ", count().live_bytes, " of ",
                       count().limit_bytes, " bytes are in use");
    }
    void* block = native->raw_allocate(num_bytes);
    if (block != nullptr) {
      const std::lock_guard<std::mutex> guard(count().mutex);
      count().sizes[block] = num_bytes;
      count().live_bytes += num_bytes;
      if (count().live_bytes > count().peak_bytes) count().peak_bytes = count().live_bytes;
    }
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t num_bytes) const override { default_copy_data(to, from, num_bytes); }
};

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void allocated_install() {
  if (native != nullptr) return;
  native = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new CountingAllocator, kPriority);  // never destroyed, as count()
}

__attribute__((visibility("default"))) uint64_t allocated_live_bytes() {
  const std::lock_guard<std::mutex> guard(count().mutex);
  return count().live_bytes;
}

// From here on a request that would leave more than this alive fails as on a full GPU.
__attribute__((visibility("default"))) void allocated_limit(uint64_t num_bytes) {
  const std::lock_guard<std::mutex> guard(count().mutex);
  count().limit_bytes = num_bytes;
}

// The most since the last call; from here on it starts at what is alive now.
__attribute__((visibility("default"))) uint64_t allocated_take_peak_bytes() {
  const std::lock_guard<std::mutex> guard(count().mutex);
  const uint64_t peak = count().peak_bytes;
  count().peak_bytes = count().live_bytes;
  return peak;
}
}
