// The rules of the planned core, one at a time.
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../core/managed_memory.h"
#include "../core/pending_events.h"
#include "../core/planned_core.h"
#include "check.h"

using namespace memo;

namespace {

constexpr int64_t kArenaBytes = 4096;

// A core in planned mode with an arena. Phase 0: 100 bytes at 0, 200 native, 300 at 128; phase 1: 100 at 0.
struct Planned {
  alignas(64) std::array<char, kArenaBytes> arena{};
  PlannedCore core;

  Planned() : Planned(Plan{{{100, 0}, {200, kNative}, {300, 128}, {100, 0}}, {3, 4}, 64, 64, kArenaBytes}) {}
  explicit Planned(Plan plan) {
    CHECK(!find_fault(plan));
    core.set_arena(arena.data(), arena.size());
    core.load(std::move(plan));
    core.set_mode(Mode::kPlanned);
  }

  void begin(int64_t phase) {
    core.begin_iteration();
    core.mark(phase);
  }
  void* at(int64_t offset) { return arena.data() + offset; }
  int64_t fallbacks(Reason reason) const { return core.statistics().fallbacks[static_cast<int64_t>(reason)]; }
  int64_t all_fallbacks() const {
    int64_t sum = 0;
    for (int64_t count : core.statistics().fallbacks) sum += count;
    return sum;
  }
};

void test_plan_is_served_in_order() {
  Planned t;
  for (int iteration = 0; iteration < 3; ++iteration) {
    t.begin(0);
    CHECK(t.core.request(100) == t.at(0));
    CHECK(t.core.request(200) == nullptr);
    CHECK(t.core.request(300) == t.at(128));
    CHECK(t.core.release(t.at(0)));
    t.core.mark(1);
    CHECK(t.core.request(100) == t.at(0));
    CHECK(t.core.release(t.at(0)));
    CHECK(t.core.release(t.at(128)));
    t.core.end_iteration();
  }
  const Statistics s = t.core.statistics();
  CHECK(s.requests == 12 && s.hits == 9 && s.native == 3 && s.unasked == 0 && s.outside == 0);
  CHECK(t.all_fallbacks() == 0 && s.live_bytes == 0 && s.live_blocks == 0);
  CHECK(s.peak_bytes == 400 && s.arena_bytes == kArenaBytes);
}

void test_small_requests_are_neither_planned_nor_counted() {
  Planned t;
  t.begin(0);
  CHECK(t.core.request(63) == nullptr);
  CHECK(t.core.statistics().requests == 0);
  CHECK(t.core.request(100) == t.at(0));
}

void test_wrong_size_holds_the_cursor() {
  Planned t;
  t.begin(0);
  CHECK(t.core.request(101) == nullptr);
  CHECK(t.core.request(300) == nullptr);  // planned, but not yet: no look-ahead
  CHECK(t.fallbacks(Reason::kSize) == 2);
  CHECK(t.core.request(100) == t.at(0));
  CHECK(t.core.request(300) == nullptr);
  const Statistics s = t.core.statistics();
  const Mismatch* first = s.first[static_cast<int64_t>(Reason::kSize)];
  CHECK(first[0].phase == 0 && first[0].position == 0 && first[0].expected_bytes == 100 && first[0].found_bytes == 101);
  CHECK(first[2].phase == 0 && first[2].position == 1 && first[2].expected_bytes == 200 && first[2].found_bytes == 300);
}

void test_next_phase_finds_its_place_again() {
  Planned t;
  t.begin(0);
  CHECK(t.core.request(999) == nullptr);
  t.core.mark(1);
  CHECK(t.core.request(100) == t.at(0));
  CHECK(t.core.statistics().unasked == 3);
  t.core.end_iteration();
  CHECK(t.core.statistics().unasked == 3);
}

void test_exhausted_phase() {
  Planned t;
  t.begin(1);
  CHECK(t.core.request(100) == t.at(0));
  CHECK(t.core.request(100) == nullptr);
  CHECK(t.fallbacks(Reason::kExhausted) == 1);
  const Mismatch first = t.core.statistics().first[static_cast<int64_t>(Reason::kExhausted)][0];
  CHECK(first.phase == 1 && first.position == 1 && first.expected_bytes == 0 && first.found_bytes == 100);
}

// Phase 0: 100 bytes at 0. Phase 1, attention: a block of 1024 at 1024. Phase 2: 1000 bytes at 1024.
Planned with_attention() {
  return Planned(Plan{{{100, 0}, {1024, 1024}, {1000, 1024}},
                      {1, 2, 3},
                      64,
                      64,
                      kArenaBytes,
                      {false, true, false}});
}

void test_attention_asks_for_what_it_likes_within_its_block() {
  Planned t = with_attention();
  t.begin(0);
  CHECK(t.core.request(100) == t.at(0));
  for (int iteration = 0; iteration < 2; ++iteration) {
    t.core.mark(1);
    CHECK(t.core.request(512) == t.at(1024));
    CHECK(t.core.request(70) == t.at(1536));
    CHECK(t.core.release(t.at(1024)));
    CHECK(t.core.request(513) == nullptr);  // the lower gap has 512 bytes, the upper one 384
    CHECK(t.fallbacks(Reason::kBlock) == iteration + 1);
    CHECK(t.core.request(500) == t.at(1024) && t.core.request(384) == t.at(1664));
    for (int64_t offset : {1024, 1536, 1664}) CHECK(t.core.release(t.at(offset)));
    t.core.mark(2);  // the next phase finds its place
    CHECK(t.core.request(1000) == t.at(1024));
    CHECK(t.core.release(t.at(1024)));
  }
  const Statistics s = t.core.statistics();
  CHECK(s.requests == 13 && s.hits == 11 && s.unasked == 0 && s.live_blocks == 1);
  const Mismatch first = s.first[static_cast<int64_t>(Reason::kBlock)][0];
  CHECK(first.phase == 1 && first.position == 0 && first.expected_bytes == 1024 && first.found_bytes == 513);
}

void test_what_is_alive_in_the_block_of_attention_is_not_given_again() {
  Planned t = with_attention();
  t.begin(1);
  CHECK(t.core.request(300) == t.at(1024) && t.core.request(700) == t.at(1344));
  t.core.mark(1);  // the next layer, while both blocks are alive
  CHECK(t.core.request(20 + 64) == nullptr && t.fallbacks(Reason::kBlock) == 1);
  CHECK(t.core.release(t.at(1024)));
  CHECK(t.core.request(64) == t.at(1024) && t.core.request(256) == t.at(1088));
  t.core.mark(2);
  CHECK(t.core.request(1000) == nullptr && t.fallbacks(Reason::kOverlap) == 1);
}

void test_live_block_is_never_given_twice_and_the_plan_goes_on() {
  Planned t;
  t.begin(0);
  CHECK(t.core.request(100) == t.at(0));
  t.begin(0);  // the iteration was cut short; its block stays alive
  CHECK(t.core.request(100) == nullptr);
  CHECK(t.fallbacks(Reason::kOverlap) == 1);
  CHECK(t.core.request(200) == nullptr);
  CHECK(t.core.request(300) == t.at(128));
  CHECK(t.all_fallbacks() == 1);
  CHECK(t.core.release(t.at(0)));
  t.core.mark(1);
  CHECK(t.core.request(100) == t.at(0));
}

void test_only_the_thread_that_marked_is_planned() {
  Planned t;
  t.begin(0);
  std::thread([&] { CHECK(t.core.request(100) == nullptr); }).join();
  CHECK(t.fallbacks(Reason::kThread) == 1);
  CHECK(t.core.request(100) == t.at(0));
  std::thread([&] {
    CHECK(t.core.release(t.at(0)));  // frees from any thread count
    t.core.mark(1);                  // as autograd's thread does
    CHECK(t.core.request(100) == t.at(0));
  }).join();
  CHECK(t.all_fallbacks() == 1);
}

void test_only_the_stream_of_the_arena_is_planned() {
  Planned t;
  t.core.set_stream(7);
  t.begin(0);
  CHECK(t.core.request(100, 8) == nullptr);
  CHECK(t.fallbacks(Reason::kStream) == 1);
  CHECK(t.core.request(100, 7) == t.at(0));
}

void test_outside_of_phases_nothing_is_planned() {
  Planned t;
  CHECK(t.core.request(100) == nullptr);  // before the iteration
  t.core.mark(0);
  CHECK(t.core.request(100) == nullptr);  // a mark without an iteration
  t.core.begin_iteration();
  CHECK(t.core.request(100) == nullptr);  // before the first phase
  for (int64_t unknown : {kNoPhase, int64_t{2}}) {
    t.core.mark(unknown);
    CHECK(t.core.request(100) == nullptr);
  }
  t.core.mark(0);
  t.core.end_iteration();
  CHECK(t.core.request(100) == nullptr);
  const Statistics s = t.core.statistics();
  CHECK(s.outside == 6 && s.requests == 0 && s.unasked == 3);
}

void test_other_modes_serve_nothing_but_free_everything() {
  Planned t;
  t.begin(0);
  CHECK(t.core.request(100) == t.at(0));
  for (Mode mode : {Mode::kPassthrough, Mode::kRecord}) {
    t.core.set_mode(mode);
    t.begin(0);
    CHECK(t.core.request(100) == nullptr);
  }
  CHECK(t.core.statistics().requests == 1);
  CHECK(t.core.release(t.at(0)));
  CHECK(t.core.statistics().live_blocks == 0);
}

void test_foreign_addresses_are_left_to_the_native_allocator() {
  Planned t;
  char other = 0;
  CHECK(!t.core.release(&other));
  CHECK(!t.core.in_arena(t.arena.data() - 1) && t.core.in_arena(t.arena.data()));
  CHECK(t.core.in_arena(t.arena.data() + kArenaBytes - 1) && !t.core.in_arena(t.arena.data() + kArenaBytes));
  PlannedCore without_arena;
  CHECK(!without_arena.in_arena(nullptr) && !without_arena.in_arena(&other));
}

void test_arena_stays_while_blocks_live() {
  Planned t;
  t.begin(0);
  CHECK(t.core.request(100) == t.at(0));
  t.core.load({});
  CHECK(!t.core.unload_arena().has_value());
  CHECK(t.core.release(t.at(0)));
  CHECK(t.core.unload_arena() == t.arena.data());
  CHECK(t.core.unload_arena() == nullptr);
  CHECK(!t.core.in_arena(t.at(0)));
}

// For the test below: the thread that waits for the core's mutex, and whether it has begun to wait.
std::atomic<pid_t> g_waiter{0};
std::atomic<bool> g_mutex_is_held{false};

// The state of a thread as Linux reports it: 'R' while it runs, 'S' while it sleeps.
char state_of(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string line;
  std::getline(file, line);
  return line.at(line.rfind(')') + 2);
}

// If a free checks the arena without the mutex and gets the mutex only after the arena is gone, it leaves the block to
// the native allocator. A fill runs under the mutex, so the fill makes the other thread wait.
void test_a_block_is_looked_at_again_under_the_mutex() {
  int num_left_alone = 0;
  for (int round = 0; round < 1000 && num_left_alone == 0; ++round) {
    Planned t;
    g_waiter = 0;
    g_mutex_is_held = false;
    t.core.set_fill([](void*, size_t) {
      g_mutex_is_held = true;
      while (state_of(g_waiter) != 'S') std::this_thread::yield();  // until then it may not have checked the arena
    });
    bool is_planned = true;
    std::thread other([&] {
      g_waiter = static_cast<pid_t>(syscall(SYS_gettid));
      while (!g_mutex_is_held) std::this_thread::yield();
      is_planned = t.core.release(t.at(2048));
    });
    while (g_waiter == 0) std::this_thread::yield();
    t.begin(0);
    CHECK(t.core.request(100) == t.at(0));
    CHECK(t.core.release(t.at(0)));
    CHECK(t.core.unload_arena() == t.arena.data());  // usually before the other thread has woken up
    other.join();
    num_left_alone += !is_planned;
    CHECK(t.core.take_fault(nullptr).empty() == !is_planned);
  }
  CHECK(num_left_alone == 1);
}

void test_freed_blocks_are_filled() {
  Planned t;
  t.core.set_fill([](void* block, size_t num_bytes) { std::memset(block, 0xff, num_bytes); });
  t.begin(0);
  CHECK(t.core.request(100) == t.at(0));
  CHECK(t.arena[99] == 0);
  CHECK(t.core.release(t.at(0)));
  CHECK(t.arena[0] == '\xff' && t.arena[99] == '\xff' && t.arena[100] == 0);
}

void test_statistics_start_again() {
  Planned t;
  t.begin(0);
  CHECK(t.core.request(100) == t.at(0));
  CHECK(t.core.request(1000) == nullptr);
  t.core.reset_statistics();
  const Statistics s = t.core.statistics();
  CHECK(s.requests == 0 && s.hits == 0 && t.all_fallbacks() == 0);
  CHECK(s.live_bytes == 100 && s.live_blocks == 1 && s.peak_bytes == 100);
}

void test_only_the_first_mismatches_are_named() {
  Planned t;
  t.begin(0);
  for (int64_t i = 0; i < 2 * kNumNamed; ++i) CHECK(t.core.request(1000 + i) == nullptr);
  const Statistics s = t.core.statistics();
  CHECK(s.fallbacks[0] == 2 * kNumNamed && s.first[0][kNumNamed - 1].found_bytes == 1000 + kNumNamed - 1);
  CHECK(s.first[1][0].found_bytes == 0);  // the next reason's
}

void test_recording() {
  PlannedCore core;
  char before, a, b, c;
  core.set_stream(7);
  core.set_mode(Mode::kRecord);
  core.note_native(&before, 1, 7);  // outside of the iteration
  core.begin_iteration();
  core.mark(0);
  CHECK(core.request(10, 7) == nullptr);
  core.note_native(&a, 10, 7);
  core.note_native(&c, 5, 8);                                     // on another stream
  std::thread([&] { core.note_native(&b, 6, 7); }).join();        // in another thread
  CHECK(!core.release(&before) && !core.release(&b) && !core.release(&c));
  core.mark(1);
  core.note_native(&b, 20, 7);
  std::thread([&] { CHECK(!core.release(&a)); }).join();
  core.note_native(&a, 30, 7);  // the same address, another request
  core.note_native(nullptr, 0, 7);
  CHECK(!core.release(&a));
  CHECK(!core.release(&a));  // now a block that was not recorded
  core.end_iteration();
  CHECK(!core.release(&b));  // too late: it outlived the iteration
  const std::vector<Event> events = core.events();
  const std::vector<std::array<int64_t, 3>> expected = {{0, 0, 10}, {1, 1, 20}, {1, 0, 0}, {1, 2, 30}, {1, 2, 0}};
  CHECK(events.size() == expected.size() && core.num_events() == 5);
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(events[i].phase == expected[i][0] && events[i].id == expected[i][1] && events[i].num_bytes == expected[i][2]);
  }
  core.begin_iteration();
  CHECK(core.num_events() == 0);
}

void test_faults_of_plans() {
  const auto says = [](const Plan& plan, const char* text) {
    const auto fault = find_fault(plan);
    return fault.has_value() && *fault == text;
  };
  CHECK(!find_fault({}));
  CHECK(!find_fault({{{4096, 0}}, {1}, 1, 64, 4096}));
  CHECK(says({{{1, 0}}, {1, 0}, 1, 1, 1}, "the phases are not in order"));
  CHECK(says({{{1, 0}}, {0}, 1, 1, 1}, "the phases do not hold all requests"));
  CHECK(says({{}, {}, 1, 0, 1}, "alignment_bytes is 0"));
  CHECK(says({{{10, 0}}, {1}, 11, 1, 99}, "request 0 has 10 bytes, but min_bytes is 11"));
  CHECK(says({{{0, 0}}, {1}, 0, 1, 99}, "request 0 has 0 bytes, but min_bytes is 0"));
  CHECK(says({{{1, 0}, {1, 63}}, {2}, 1, 64, 99}, "request 1 has offset 63, not a multiple of alignment_bytes 64"));
  CHECK(says({{{1, -2}}, {1}, 1, 1, 99}, "request 0 has offset -2, not a multiple of alignment_bytes 1"));
  CHECK(says({{{36, 64}}, {1}, 1, 64, 99}, "request 0 ends at 64 + 36, behind arena_bytes 99"));
  CHECK(says({{{1, 0}}, {1}, 1, 1, 1, {true, false}}, "not every phase says whether it has a block"));
  const char* const no_block = "phase 0 is attention's, but has not one block with a place";
  CHECK(says({{{1, 0}}, {0, 1}, 1, 1, 1, {true, false}}, no_block));
  CHECK(says({{{1, kNative}}, {1}, 1, 1, 1, {true}}, no_block));
  CHECK(says({{{1, 0}, {1, 1}}, {2}, 1, 1, 2, {true}}, no_block));
  CHECK(find_fault({{{INT64_MAX, 64}}, {1}, 1, 64, INT64_MAX}).has_value());
}

void test_pending_events_are_waited_for_once() {
  PendingEvents<int> pending;
  const std::array<char, 1000> arena{};
  std::vector<int> waited;
  const auto take = [&](int begin, int num_bytes) {
    waited.clear();
    pending.take(arena.data() + begin, num_bytes, [&](int event) { waited.push_back(event); });
    return waited.size();
  };
  pending.add(arena.data() + 100, 100, 1);
  pending.add(arena.data() + 200, 100, 2);
  pending.add(arena.data() + 400, 1, 3);
  CHECK(take(0, 100) == 0 && take(300, 100) == 0 && take(401, 99) == 0);
  CHECK(take(199, 2) == 2 && waited[0] + waited[1] == 3);
  CHECK(take(100, 200) == 0);
  CHECK(take(0, 1000) == 1 && waited[0] == 3);
  CHECK(take(0, 1000) == 0);
}

void test_double_free_is_told_and_frees_nothing() {
  Planned t;
  t.begin(0);
  CHECK(t.core.request(100) == t.at(0));
  CHECK(t.core.take_fault().empty());
  CHECK(t.core.release(t.at(1)));  // inside the arena: the native allocator must never free it
  CHECK(t.core.statistics().live_blocks == 1);
  CHECK(t.core.release(t.at(0)) && t.core.statistics().live_blocks == 0);
  CHECK(t.core.release(t.at(0)));
  int64_t num_faults = 0;
  CHECK(t.core.take_fault(&num_faults) == "double free of the planned block at offset 1" && num_faults == 2);
  CHECK(t.core.take_fault(&num_faults).empty() && num_faults == 0);
}

void test_a_fill_that_throws_frees_the_block_and_is_told() {
  Planned t;
  t.core.set_fill([](void*, size_t) { throw std::runtime_error("no stream " + std::string(400, 'x')); });
  for (int iteration = 0; iteration < 2; ++iteration) {
    t.begin(0);
    CHECK(t.core.request(100) == t.at(0));
    CHECK(t.core.release(t.at(0)) && t.core.statistics().live_blocks == 0);
  }
  CHECK(t.core.take_fault().rfind("no stream xxx", 0) == 0);
}

void test_a_block_that_was_not_handed_out_is_not_alive() {
  Planned t;
  t.core.set_fill([](void*, size_t) { CHECK(false); });
  for (int iteration = 0; iteration < 2; ++iteration) {
    t.begin(0);
    CHECK(t.core.request(100) == t.at(0));
    t.core.forgo(t.at(0));
  }
  CHECK(t.core.statistics().live_bytes == 0 && t.all_fallbacks() == 0 && t.core.take_fault().empty());
}

void test_a_wait_that_throws_is_waited_for_again() {
  PendingEvents<int> pending;
  std::array<char, 100> memory{};
  pending.add(memory.data(), 10, 1);
  pending.add(memory.data() + 20, 10, 2);
  bool is_thrown = false;
  try {
    pending.take(memory.data(), 100, [](int event) {
      if (event == 2) throw std::runtime_error("no device");
    });
  } catch (const std::runtime_error&) {
    is_thrown = true;
  }
  std::vector<int> waited;
  pending.take(memory.data(), 100, [&](int event) { waited.push_back(event); });
  CHECK(is_thrown && waited == std::vector<int>{2});
}

// Addresses of this array represent blocks.
struct Managed {
  using Answer = ManagedMemory::Answer;
  static constexpr size_t kMib = 1 << 20;
  std::array<char, 8> places{};
  ManagedMemory memory;

  const void* take(size_t place, size_t num_bytes) {
    CHECK(memory.ask(num_bytes) == Answer::kManaged);
    memory.note(&places[place], num_bytes);
    return &places[place];
  }
};

void test_managed_memory_is_asked_for_only_while_open() {
  Managed t;
  CHECK(t.memory.ask(t.kMib) == Managed::Answer::kNative);
  t.memory.open(10 * t.kMib);
  CHECK(t.memory.ask(t.kMib - 1) == Managed::Answer::kNative);
  const void* block = t.take(0, t.kMib);
  t.memory.close();
  CHECK(t.memory.ask(t.kMib) == Managed::Answer::kNative);
  CHECK(t.memory.has(block) && !t.memory.has(&t.places[1]));
  CHECK(!t.memory.release(&t.places[1]) && t.memory.release(block) && !t.memory.release(block));
  CHECK(t.memory.use().live_bytes == 0 && !t.memory.has(block));
}

void test_managed_memory_never_passes_its_limit() {
  Managed t;
  t.memory.open(4 * t.kMib);
  const void* first = t.take(0, 2 * t.kMib);
  const void* second = t.take(1, t.kMib + 1);  // in whole pages
  CHECK(t.memory.use().live_bytes == 3 * Managed::kMib + ManagedMemory::kPageBytes);
  CHECK(t.memory.ask(t.kMib) == Managed::Answer::kRefused);
  CHECK(t.memory.ask(size_t{1} << 62) == Managed::Answer::kRefused);  // the first refusal is reported
  CHECK(t.memory.use().refused_bytes == 4 * Managed::kMib + ManagedMemory::kPageBytes);
  CHECK(t.memory.release(second));
  t.take(2, 2 * t.kMib);  // just fits
  CHECK(t.memory.use().peak_bytes == 4 * Managed::kMib);
  CHECK(t.memory.release(first));
}

void test_managed_memory_that_could_not_be_had_does_not_count() {
  Managed t;
  t.memory.open(2 * t.kMib);
  CHECK(t.memory.ask(2 * t.kMib) == Managed::Answer::kManaged);
  t.memory.forgo(2 * t.kMib);
  CHECK(t.memory.use().live_bytes == 0);
  const void* block = t.take(0, 2 * t.kMib);
  t.memory.open(5 * t.kMib);  // live blocks still count
  CHECK(t.memory.use().live_bytes == 2 * Managed::kMib && t.memory.use().refused_bytes == 0);
  CHECK(t.memory.ask(4 * t.kMib) == Managed::Answer::kRefused);
  CHECK(t.memory.release(block));
}

}  // namespace

int main() {
  test_double_free_is_told_and_frees_nothing();
  test_a_fill_that_throws_frees_the_block_and_is_told();
  test_a_block_that_was_not_handed_out_is_not_alive();
  test_a_wait_that_throws_is_waited_for_again();
  test_plan_is_served_in_order();
  test_small_requests_are_neither_planned_nor_counted();
  test_wrong_size_holds_the_cursor();
  test_next_phase_finds_its_place_again();
  test_exhausted_phase();
  test_attention_asks_for_what_it_likes_within_its_block();
  test_what_is_alive_in_the_block_of_attention_is_not_given_again();
  test_live_block_is_never_given_twice_and_the_plan_goes_on();
  test_only_the_thread_that_marked_is_planned();
  test_only_the_stream_of_the_arena_is_planned();
  test_outside_of_phases_nothing_is_planned();
  test_other_modes_serve_nothing_but_free_everything();
  test_foreign_addresses_are_left_to_the_native_allocator();
  test_arena_stays_while_blocks_live();
  test_a_block_is_looked_at_again_under_the_mutex();
  test_freed_blocks_are_filled();
  test_statistics_start_again();
  test_only_the_first_mismatches_are_named();
  test_recording();
  test_faults_of_plans();
  test_pending_events_are_waited_for_once();
  test_managed_memory_is_asked_for_only_while_open();
  test_managed_memory_never_passes_its_limit();
  test_managed_memory_that_could_not_be_had_does_not_count();
  std::puts("core: all rules hold");
}
