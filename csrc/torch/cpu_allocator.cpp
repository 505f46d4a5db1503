// torch's CPU allocator with a plan over it. The native one stays below and serves requests that are not planned.
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <stdexcept>

#include "../core/control.h"

namespace memo {
namespace {

constexpr uint8_t kPriority = 255;  // c10 keeps the allocator with the highest

c10::Allocator* native = nullptr;  // set once, before the first call of a function below

// Serves as c10's raw deleter. Finds the owner by the address, so it can free blocks from before install().
void release_block(void* block) noexcept {
  if (block == nullptr || core().release(block)) return;
  native->raw_deleter()(block);
}

class PlannedCpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    void* block = core().request(num_bytes);
    if (block == nullptr) {
      block = native->raw_allocate(num_bytes);
      core().note_native(block, num_bytes);
    }
    // No separate context: users of raw_allocate() require data and context to be the same address.
    return {block, block, &release_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }

  void copy_data(void* to, const void* from, size_t num_bytes) const override { default_copy_data(to, from, num_bytes); }
};

}  // namespace

void install() {
  c10::Allocator* found = c10::GetCPUAllocator();
  if (found->raw_deleter() == nullptr) throw std::runtime_error("the present CPU allocator cannot free by address");
  native = found;
  auto* planned = new PlannedCpuAllocator;  // never destroyed, as core() says
  c10::SetCPUAllocator(planned, kPriority);
  if (c10::GetCPUAllocator() != planned) throw std::runtime_error("torch kept another CPU allocator");
}

char* take_arena(size_t num_bytes) { return static_cast<char*>(native->raw_allocate(num_bytes)); }
void give_arena(char* arena, size_t /*num_bytes*/) { native->raw_deleter()(arena); }
StreamId bind_stream() { return 0; }
void settle(void*) {}  // a CPU has no streams
void fill_with_nan(void* block, size_t num_bytes) { std::memset(block, 0xff, num_bytes); }
bool has_managed_memory() { return false; }

}  // namespace memo
