// The emulated GPU and its schedule, read once from the file named by EMULATED_GPU.
//
// The file has one setting on each line, "name value"; empty lines and lines that begin with # are skipped. An unknown
// name ends the process with one message. Without the variable all settings have the defaults below.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>

namespace emulated {

struct Settings {
  std::string name = "NVIDIA H100 80GB HBM3";
  int num_devices = 8;
  double memory_gib = 80;
  double context_gib = 0.5;  // memory that a process loses of memory_gib when it uses a device
  int capability = 90;       // compute capability times ten
  int multiprocessors = 132;
  std::string schedule = "eager";  // eager, lazy, random
  uint64_t seed = 0;               // of the random schedule
  bool check_races = false;
  bool poison = false;   // memory is NaN when it is handed out and when it is given back
  bool without_numbers = false;  // tensors above kMostRealBytes (emulator.h) are address space without content
  double host_memory_gib = 0;    // of the machine; 0: of this one
  std::string timed;             // the hardware whose model gives virtual time; empty: time is the host's
  double host_launch_s = 5e-6;   // virtual time in which the host queues a piece of work
  double max_product_gflop = 100;  // larger products of matrices are zeros, with a message: they measure a GPU
  double hang_s = 60;    // a wait of the host that lasts longer is reported on stderr
};

inline Settings read_settings(const char* path) {
  Settings settings;
  if (path == nullptr || *path == '\0') return settings;
  using Setter = std::function<void(const std::string&)>;
  const auto real = [](double& place) -> Setter { return [&place](const std::string& v) { place = std::stod(v); }; };
  const auto whole = [](int& place) -> Setter { return [&place](const std::string& v) { place = std::stoi(v); }; };
  const auto text = [](std::string& place) -> Setter { return [&place](const std::string& v) { place = v; }; };
  const auto flag = [](bool& place) -> Setter { return [&place](const std::string& v) { place = v == "1"; }; };
  const std::map<std::string, Setter> known = {
      {"name", text(settings.name)},
      {"num_devices", whole(settings.num_devices)},
      {"memory_gib", real(settings.memory_gib)},
      {"context_gib", real(settings.context_gib)},
      {"capability", whole(settings.capability)},
      {"multiprocessors", whole(settings.multiprocessors)},
      {"schedule", text(settings.schedule)},
      {"seed", [&settings](const std::string& v) { settings.seed = std::stoull(v); }},
      {"check_races", flag(settings.check_races)},
      {"poison", flag(settings.poison)},
      {"without_numbers", flag(settings.without_numbers)},
      {"host_memory_gib", real(settings.host_memory_gib)},
      {"timed", text(settings.timed)},
      {"host_launch_s", real(settings.host_launch_s)},
      {"max_product_gflop", real(settings.max_product_gflop)},
      {"hang_s", real(settings.hang_s)},
  };
  const auto refuse = [path](const std::string& what) {
    std::fprintf(stderr, "emulated GPU: %s: %s\n", path, what.c_str());
    std::exit(2);
  };
  std::ifstream file(path);
  if (!file) refuse("the file that EMULATED_GPU names cannot be read");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, value;
    words >> name >> std::ws;
    std::getline(words, value);
    if (name.empty() || name[0] == '#') continue;
    const auto found = known.find(name);
    if (found == known.end()) refuse("there is no setting '" + name + "'");
    try {
      found->second(value);
    } catch (const std::exception&) {
      refuse("'" + name + "' cannot be '" + value + "'");
    }
  }
  return settings;
}

// The settings of this library. Each library reads the same file.
inline const Settings& settings() {
  static const auto* const only = new Settings(read_settings(std::getenv("EMULATED_GPU")));
  return *only;
}

}  // namespace emulated
