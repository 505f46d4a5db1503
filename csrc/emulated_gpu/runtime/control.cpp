// The calls of operators, collectives and Python to the runtime (emulator.h), and those of Python only.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "process.h"

using namespace emulated;

namespace {

using Model = double (*)(const char* kind, const char* dtype, const double* sizes, int num_sizes);
std::atomic<Model> model{nullptr};

constexpr auto kUnattendedPause = std::chrono::milliseconds(2);
std::atomic<bool> is_ending{false};

// Lets a device work without its host. It works slowly, so that the schedule is unchanged while the host does wait.
void work_unattended() {
  Process& p = process();
  while (!is_ending) {
    std::this_thread::sleep_for(kUnattendedPause);
    Lock lock(p.mutex, std::try_to_lock);
    if (lock && !is_ending) p.scheduler.step_all(lock);
  }
}

}  // namespace

EXPORTED void emulated_enqueue(void* stream, const char* name, Work* work, const Access* access, const Load* load) {
  emulated_count("kernels");
  (void)issue(static_cast<cudaStream_t>(stream), name, std::move(*work), access, *load);
}

EXPORTED int emulated_is_timed() { return !settings().timed.empty(); }
EXPORTED double emulated_seconds(const char* kind, const char* dtype, const double* sizes, int num_sizes) {
  const auto seconds = model.load();
  return seconds == nullptr || thread().timeless > 0 ? 0 : seconds(kind, dtype, sizes, num_sizes);
}

EXPORTED void emulated_use_on_host(const char* name, const Access* access) {
  Lock lock(process().mutex);
  const auto is_elsewhere = [](const Range& range) {
    const Block* const block = process().memory.find(reinterpret_cast<const void*>(range.begin));
    return block == nullptr || (block->kind != Kind::kPinned && block->kind != Kind::kRegistered);
  };
  Access pinned = *access;
  for (auto* const ranges : {&pinned.reads, &pinned.writes}) {
    ranges->erase(std::remove_if(ranges->begin(), ranges->end(), is_elsewhere), ranges->end());
  }
  if (!pinned.reads.empty() || !pinned.writes.empty()) process().scheduler.use_on_host(lock, name, pinned);
}

EXPORTED void emulated_mute(int change) { thread().mute += change; }
EXPORTED int emulated_is_mute() { return thread().mute > 0; }
EXPORTED void emulated_wait_for_stream(void* stream, const char* why) {
  (void)wait_for_stream(static_cast<cudaStream_t>(stream), why);
}
EXPORTED void emulated_kernel_failed(const char* message) { fail_for_good(cudaErrorLaunchFailure, message); }
EXPORTED void emulated_count(const char* what) {
  const Lock lock(process().mutex);
  process().count(what);
}
EXPORTED int emulated_is_device_memory(const void* address) {
  const Lock lock(process().mutex);
  const Block* const block = process().memory.find(address);
  return block != nullptr && (block->kind == Kind::kDevice || block->kind == Kind::kManaged);
}
EXPORTED int emulated_checks_races() { return process().scheduler.checks_races; }
EXPORTED int emulated_has_numbers(size_t num_bytes) {
  return !settings().without_numbers || num_bytes <= kMostRealBytes;
}
EXPORTED int emulated_is_absent(const Range* range) {
  const Lock lock(process().mutex);
  return process().absent.holds(*range);
}
EXPORTED void emulated_set_absent(const Range* range, int is_absent) {
  if (!settings().without_numbers) return;
  const Lock lock(process().mutex);
  process().absent.set(*range, is_absent != 0);
}
EXPORTED int emulated_poisons() { return settings().poison; }
EXPORTED double emulated_max_product_gflop() { return settings().max_product_gflop; }

EXPORTED void emulated_on_hang(void (*tell)()) {
  const Lock lock(process().mutex);
  process().scheduler.tell_more_of_hang = tell;
}

EXPORTED void emulated_work_unattended() {
  static std::once_flag once;
  std::call_once(once, [] {
    std::thread(work_unattended).detach();
    std::atexit([] {
      is_ending = true;
      const Lock lock(process().mutex);  // the thread is not inside
    });
  });
}

// ---- for Python

EXPORTED void emulated_set_schedule(const char* policy, uint64_t seed) {
  Process& p = process();
  for (int device = 0; device < settings().num_devices; ++device) {
    Lock lock(p.mutex);
    p.scheduler.synchronize_device(lock, device);
  }
  const Lock lock(p.mutex);
  p.scheduler.set_policy(policy, seed);
}

// The setting: "": time is the host's.
EXPORTED const char* emulated_timed_hardware() { return settings().timed.c_str(); }
EXPORTED void emulated_set_model(Model seconds) { model = seconds; }

EXPORTED double emulated_now_s() {
  const Lock lock(process().mutex);
  return process().scheduler.timeline().now_s();
}

// Between +1 and -1 the work that the calling thread queues takes no virtual time.
EXPORTED void emulated_take_no_time(int change) { thread().timeless += change; }

// A message of a process group of which only this rank exists: it only takes time.
EXPORTED void emulated_message(void* stream, double seconds) {
  const Load load{Engine::kNone, seconds, nullptr};
  (void)issue(static_cast<cudaStream_t>(stream), "simulated message", [] { return true; }, nullptr, load);
}

EXPORTED uint64_t emulated_host_memory_bytes() { return process().memory.host_bytes(); }

EXPORTED void emulated_set_race_checks(int is_on) {
  const Lock lock(process().mutex);
  process().scheduler.checks_races = is_on != 0;
}

EXPORTED uint64_t emulated_num_waits() {
  const Lock lock(process().mutex);
  return process().scheduler.num_waits();
}
EXPORTED int emulated_is_wait_redundant(uint64_t number) {
  const Lock lock(process().mutex);
  return process().scheduler.is_wait_redundant(number);
}

// Of the calling thread, until it says otherwise.
EXPORTED void emulated_hide(int waits, int recordings) { Scheduler::hide(waits != 0, recordings != 0); }

EXPORTED void emulated_on_synchronization(void (*function)(const char* what)) {
  process().on_synchronization = function;
}

EXPORTED void emulated_clear_report() {
  const Lock lock(process().mutex);
  process().counts.clear();
  process().scheduler.timeline().clear_taken();
  process().scheduler.races.clear_found();
}

// Lines of "count<tab>name<tab>times", "race<tab>text<tab>times", "bytes<tab>of what<tab>bytes" and
// "nanoseconds<tab>of what work<tab>virtual time".
// Returns the length of the whole report, of which at most num_chars - 1 characters are written.
EXPORTED int emulated_report(char* text, int num_chars) {
  const Lock lock(process().mutex);
  std::string report;
  const auto add = [&report](const char* kind, const std::map<std::string, int64_t>& entries) {
    for (const auto& [name, times] : entries) report += std::string(kind) + "\t" + name + "\t" + std::to_string(times) + "\n";
  };
  add("count", process().counts);
  add("race", process().scheduler.races.found());
  add("bytes", process().memory.taken());
  std::map<std::string, int64_t> nanoseconds;
  for (const auto& [name, seconds] : process().scheduler.timeline().taken_s()) {
    nanoseconds[name] = static_cast<int64_t>(std::llround(seconds * 1e9));
  }
  add("nanoseconds", nanoseconds);
  std::snprintf(text, static_cast<size_t>(num_chars), "%s", report.c_str());
  return static_cast<int>(report.size());
}
