// The planned core against a naive model on random plans and random disobedience, and under many threads.
//
// usage: core_stress_test [rounds] [threaded iterations]
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../core/managed_memory.h"
#include "../core/planned_core.h"
#include "check.h"

using namespace memo;

namespace {

using Random = std::mt19937_64;

int64_t pick(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Offsets are random, so many of them collide: the core must notice.
Plan random_plan(Random& random) {
  Plan plan;
  plan.alignment_bytes = 64;
  plan.min_bytes = pick(random, 1, 64);
  plan.arena_bytes = pick(random, 8, 64) * 64;
  for (int64_t phase = pick(random, 1, 5); phase > 0; --phase) {
    for (int64_t n = pick(random, 0, 12); n > 0; --n) {
      const int64_t num_bytes = pick(random, plan.min_bytes, 300);
      const int64_t offset = pick(random, 0, (plan.arena_bytes - num_bytes) / 64) * 64;
      plan.requests.push_back({num_bytes, pick(random, 0, 9) == 0 ? kNative : offset});
    }
    plan.phase_ends.push_back(static_cast<int64_t>(plan.requests.size()));
  }
  return plan;
}

// The same rules, implemented only with a list of live blocks.
struct Model {
  struct Block {
    int64_t offset, num_bytes;
  };
  const Plan& plan;
  std::vector<Block> live;
  int64_t phase = kNoPhase, served = 0;
  Statistics expected{};

  void mark(int64_t next) {
    if (phase != kNoPhase) expected.unasked += plan.end_of(phase) - plan.begin_of(phase) - served;
    phase = next;
    served = 0;
  }

  int64_t miss(Reason reason) {
    ++expected.fallbacks[static_cast<int64_t>(reason)];
    return kNative;
  }

  int64_t request(int64_t num_bytes) {
    if (num_bytes < plan.min_bytes) return kNative;
    if (phase == kNoPhase) return ++expected.outside, kNative;
    ++expected.requests;
    const int64_t at = plan.begin_of(phase) + served;
    if (at == plan.end_of(phase)) return miss(Reason::kExhausted);
    const auto [size, offset] = plan.requests[static_cast<size_t>(at)];
    if (size != num_bytes) return miss(Reason::kSize);
    ++served;
    if (offset == kNative) return ++expected.native, kNative;
    for (const Block& block : live) {
      if (std::max(block.offset, offset) < std::min(block.offset + block.num_bytes, offset + num_bytes)) {
        return miss(Reason::kOverlap);
      }
    }
    live.push_back({offset, num_bytes});
    ++expected.hits;
    expected.live_bytes += num_bytes;
    expected.peak_bytes = std::max(expected.peak_bytes, expected.live_bytes);
    return offset;
  }

  int64_t free_any(Random& random) {
    const auto index = static_cast<size_t>(pick(random, 0, static_cast<int64_t>(live.size()) - 1));
    const Block block = live[index];
    live.erase(live.begin() + static_cast<std::ptrdiff_t>(index));
    expected.live_bytes -= block.num_bytes;
    return block.offset;
  }
};

void compare(const Statistics& found, const Model& model) {
  const Statistics& expected = model.expected;
  CHECK(found.requests == expected.requests && found.hits == expected.hits && found.native == expected.native);
  CHECK(found.unasked == expected.unasked && found.outside == expected.outside);
  CHECK(found.live_bytes == expected.live_bytes && found.peak_bytes == expected.peak_bytes);
  CHECK(found.live_blocks == static_cast<int64_t>(model.live.size()));
  CHECK(std::equal(found.fallbacks, found.fallbacks + kNumReasons, expected.fallbacks));
  int64_t fallbacks = 0;
  for (int64_t count : found.fallbacks) fallbacks += count;
  CHECK(found.requests == found.hits + found.native + fallbacks);
}

// Mostly follows the plan; sometimes omits a request, adds one, ends a phase early or begins one again.
void one_random_run(Random& random) {
  const Plan plan = random_plan(random);
  CHECK(!find_fault(plan));
  std::vector<char> arena(static_cast<size_t>(plan.arena_bytes));
  PlannedCore core;
  core.set_arena(arena.data(), arena.size());
  core.load(plan);
  core.set_mode(Mode::kPlanned);
  Model model{plan, {}};
  for (int iteration = 0; iteration < 4; ++iteration) {
    core.begin_iteration();
    model.mark(kNoPhase);
    for (int step = 0; step < 60; ++step) {
      const int64_t dice = pick(random, 0, 99);
      if (dice < 10) {
        const int64_t phase = pick(random, 0, plan.num_phases() - 1);
        core.mark(phase);
        model.mark(phase);
      } else if (dice < 45 && !model.live.empty()) {
        CHECK(core.release(arena.data() + model.free_any(random)));
      } else {
        const bool obeys = dice < 90 && model.phase != kNoPhase;
        const int64_t at = obeys ? plan.begin_of(model.phase) + model.served : 0;
        const bool has_next = obeys && at < plan.end_of(model.phase);
        const int64_t num_bytes = has_next ? plan.requests[static_cast<size_t>(at)].num_bytes : pick(random, 1, 300);
        const int64_t offset = model.request(num_bytes);
        CHECK(core.request(static_cast<size_t>(num_bytes)) == (offset == kNative ? nullptr : arena.data() + offset));
      }
    }
    if (pick(random, 0, 3) != 0) {  // else it was cut short
      core.end_iteration();
      model.mark(kNoPhase);
    }
    compare(core.statistics(), model);
  }
}

// Blocks that one thread allocates and another frees.
class Mailbox {
 public:
  static constexpr size_t kFull = 1000;

  // Waits while it is full.
  void put(char* block, size_t num_bytes, char pattern) {
    while (count_ >= kFull) std::this_thread::yield();
    ++count_;
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.push_back({block, num_bytes, pattern});
  }

  // False: empty.
  bool free_one(PlannedCore& core) {
    Letter letter{};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (blocks_.empty()) return false;
      letter = blocks_.front();
      blocks_.pop_front();
      --count_;
    }
    for (size_t i = 0; i < letter.num_bytes; ++i) CHECK(letter.block[i] == letter.pattern);
    if (!core.release(letter.block)) delete[] letter.block;
    return true;
  }

 private:
  struct Letter {
    char* block;
    size_t num_bytes;
    char pattern;
  };
  std::mutex mutex_;
  std::deque<Letter> blocks_;
  std::atomic<size_t> count_{0};
};

void allocate(PlannedCore& core, Mailbox& mailbox, size_t num_bytes, char pattern) {
  auto* block = static_cast<char*>(core.request(num_bytes));
  if (block == nullptr) {
    block = new char[num_bytes];
    core.note_native(block, num_bytes);
  }
  std::memset(block, pattern, num_bytes);
  mailbox.put(block, num_bytes, pattern);
}

// A thread that trains, two that allocate beside it, two that free the others' blocks, one that changes the mode.
void many_threads(int iterations) {
  Random random(7);
  Plan plan = random_plan(random);
  while (plan.requests.size() < 20) plan = random_plan(random);
  std::vector<char> arena(static_cast<size_t>(plan.arena_bytes));
  PlannedCore core;
  core.set_arena(arena.data(), arena.size());
  core.load(plan);
  core.set_mode(Mode::kPlanned);
  Mailbox mailbox;
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (char pattern : {'a', 'b'}) {
    threads.emplace_back([&, pattern] {
      Random own(static_cast<uint64_t>(pattern));
      while (!is_over) allocate(core, mailbox, static_cast<size_t>(pick(own, 1, 300)), pattern);
    });
  }
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!is_over) mailbox.free_one(core);
    });
  }
  threads.emplace_back([&] {
    while (!is_over) {
      for (Mode mode : {Mode::kPassthrough, Mode::kRecord, Mode::kPlanned}) {
        core.set_mode(mode);
        std::this_thread::sleep_for(std::chrono::microseconds(mode == Mode::kPlanned ? 400 : 50));
        core.statistics();
      }
    }
  });
  const auto all_seen = [&] {
    const Statistics s = core.statistics();
    return s.hits > 0 && s.fallbacks[static_cast<int64_t>(Reason::kThread)] > 0 &&
           s.fallbacks[static_cast<int64_t>(Reason::kOverlap)] > 0;
  };
  for (int i = 0; i < iterations || !all_seen(); ++i) {
    core.begin_iteration();
    for (int64_t phase = 0; phase < plan.num_phases(); ++phase) {
      core.mark(phase);
      for (int64_t at = plan.begin_of(phase); at < plan.end_of(phase); ++at) {
        allocate(core, mailbox, static_cast<size_t>(plan.requests[static_cast<size_t>(at)].num_bytes), 'm');
      }
    }
    core.end_iteration();
  }
  is_over = true;
  while (mailbox.free_one(core)) {  // lets waiting threads put
  }
  for (std::thread& thread : threads) thread.join();
  while (mailbox.free_one(core)) {
  }
  const Statistics s = core.statistics();
  CHECK(s.live_blocks == 0 && s.live_bytes == 0);
}

// Threads take and free managed blocks; the bytes in use never pass the limit.
void managed_memory_of_many_threads(int iterations) {
  constexpr int kThreads = 4, kBlocks = 3;
  constexpr int64_t kLimitBytes = 8 * ManagedMemory::kMinBytes;
  ManagedMemory memory;
  memory.open(kLimitBytes);
  std::atomic<int> num_refused{0};
  char places[kThreads][kBlocks];
  std::vector<std::thread> threads;
  for (auto& own : places) {
    threads.emplace_back([&] {
      Random random(reinterpret_cast<uintptr_t>(&own));
      for (int i = 0; i < iterations; ++i) {
        for (char& block : own) {
          const auto num_bytes = static_cast<size_t>(pick(random, 1, 2) * ManagedMemory::kMinBytes);
          if (memory.ask(num_bytes) == ManagedMemory::Answer::kManaged) {
            memory.note(&block, num_bytes);
          } else {
            ++num_refused;
          }
        }
        for (char& block : own) memory.release(&block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const ManagedUse use = memory.use();
  CHECK(use.live_bytes == 0 && use.peak_bytes > 0 && use.peak_bytes <= kLimitBytes);
  CHECK((use.refused_bytes > kLimitBytes) == (num_refused > 0));
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  const int iterations = argc > 2 ? std::atoi(argv[2]) : 500;
  Random random(1);
  for (int round = 0; round < rounds; ++round) one_random_run(random);
  many_threads(iterations);
  managed_memory_of_many_threads(iterations);
  std::puts("core: the stress is over");
}
