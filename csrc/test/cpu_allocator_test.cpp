// The allocator as c10 sees it: data pointers, and the raw interface that has no data pointers.
#include <c10/core/CPUAllocator.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "../core/control.h"
#include "check.h"

namespace {

constexpr int64_t kBytes = 4096;

void plan_blocks(const std::array<int64_t, 3>& offsets) {
  int64_t requests[6];
  for (int i = 0; i < 3; ++i) {
    requests[2 * i] = kBytes;
    requests[2 * i + 1] = offsets[static_cast<size_t>(i)];
  }
  const int64_t ends[] = {3};
  const int64_t has_block[] = {0};
  CHECK(memo_load_plan(requests, 3, ends, 1, has_block, 1024, 64, 3 * kBytes) == nullptr);
  CHECK(memo_set_mode(static_cast<int>(memo::Mode::kPlanned)) == nullptr);
  memo_begin_iteration();
  memo_mark(0);
}

int64_t live_blocks() {
  memo::Statistics statistics;
  memo_statistics(&statistics);
  return statistics.live_blocks;
}

// Another thread is nearly always inside the core; each child has only the thread that forked.
void fork_while_others_hold_the_mutexes() {
  std::atomic<bool> is_over{false};
  std::thread busy([&] {
    memo::ManagedUse use;
    while (!is_over) {
      live_blocks();
      memo_managed_use(&use);
    }
  });
  for (int i = 0; i < 300; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // ends a child that waits for ever
      memo::ManagedUse use;
      memo_managed_use(&use);
      _exit(live_blocks() == 0 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  }
  is_over = true;
  busy.join();
}

}  // namespace

int main() {
  c10::DataPtr before = c10::GetCPUAllocator()->allocate(kBytes);
  CHECK(memo_install() == nullptr && memo_install() == nullptr);
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  before.clear();  // a block of the native allocator, from before install()

  CHECK(allocator.allocate(0).get() == nullptr);

  plan_blocks({0, kBytes, 2 * kBytes});
  c10::DataPtr first = allocator.allocate(kBytes);
  CHECK(memo::core().in_arena(first.get()) && first.get() == first.get_context());
  CHECK(first.get_deleter() == allocator.raw_deleter());
  std::memset(first.get(), 7, kBytes);
  c10::DataPtr copy = allocator.clone(first.get(), kBytes);
  CHECK(copy.get() == static_cast<char*>(first.get()) + kBytes && std::memcmp(copy.get(), first.get(), kBytes) == 0);
  void* raw = allocator.raw_allocate(kBytes);
  CHECK(memo::core().in_arena(raw) && live_blocks() == 3);
  void* raw_native = allocator.raw_allocate(kBytes);
  CHECK(!memo::core().in_arena(raw_native));
  allocator.raw_deallocate(raw);
  allocator.raw_deallocate(raw_native);
  first.clear();
  copy.clear();
  CHECK(live_blocks() == 0);

  CHECK(memo_take_fault() == nullptr);
  allocator.raw_deallocate(static_cast<char*>(memo::core().arena()) + 1);
  CHECK(std::strcmp(memo_take_fault(), "double free of the planned block at offset 1") == 0);
  CHECK(memo_take_fault() == nullptr);

  CHECK(memo_unload_plan() == nullptr && memo::core().arena() == nullptr);
  fork_while_others_hold_the_mutexes();
  std::puts("core: c10 is content");
}
