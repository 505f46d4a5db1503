// NCCL's interface, below torch's real ProcessGroupNCCL.
//
// Rules from NCCL's documentation: a call queues work on a stream and returns; calls between ncclGroupStart and
// ncclGroupEnd become one piece of work for each stream, whose parts go on together; all ranks call collectives of a
// communicator in the same order with the same counts and types; a difference is an error here.
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <set>
#include <utility>

#include "operation.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace emulated;

namespace {

struct UniqueId {  // ncclUniqueId
  char text[128];
};

thread_local int group_depth = 0;
thread_local std::vector<std::shared_ptr<Operation>> grouped;
std::mutex mutex;  // of the communicators' counters, and of
std::set<const Operation*> under_way;  // operations that have begun

constexpr int kMostChars = 4096;
void (*write_where)(char* text, int num_chars) = nullptr;  // the calls of the program on this thread

std::string where_now() {
  if (write_where == nullptr) return "";
  std::vector<char> text(kMostChars);
  write_where(text.data(), kMostChars);
  return text.data();
}

// In virtual time the parts of a group end together, and not before they began, even if they failed.
bool advance(const std::vector<std::shared_ptr<Operation>>& together) {
  bool is_done = true;
  if (Meeting* const meeting = together.front()->meeting.get()) meeting->over_s = std::max(meeting->over_s, meeting->here_s);
  for (const auto& operation : together) {
    const bool is_this_done = operation->advance();
    is_done &= is_this_done;
    const std::lock_guard<std::mutex> lock(mutex);
    if (is_this_done) {
      under_way.erase(operation.get());
    } else {
      under_way.insert(operation.get());
    }
  }
  return is_done;
}

// For a process that has waited too long: what it waits for, and what the other ranks do.
void tell_waiting() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Operation* operation : under_way) {
    std::fprintf(stderr, "emulated GPU: %s", operation->waiting().c_str());
  }
}

Access access_of(const std::vector<std::shared_ptr<Operation>>& operations) {
  Access access;
  for (const auto& operation : operations) {
    if (operation->input != nullptr) access.reads.push_back(bytes_at(operation->input, operation->input_bytes()));
    if (operation->output != nullptr) access.writes.push_back(bytes_at(operation->output, operation->output_bytes()));
  }
  return access;
}

// The parts go on together, so the longest counts. Collectives take no engine from kernels and copies.
Load load_of(const std::vector<std::shared_ptr<Operation>>& operations) {
  if (!emulated_is_timed()) return {};
  Load load{Engine::kNone, 0, std::make_shared<Meeting>()};
  for (const auto& operation : operations) {
    operation->meeting = load.meeting;
    operation->seconds = operation->modelled_s();
    load.seconds = std::max(load.seconds, operation->seconds);
  }
  return load;
}

// Queues the calls of a group, one piece of work for each stream.
int flush() {
  std::vector<std::shared_ptr<Operation>> left;
  left.swap(grouped);
  while (!left.empty()) {
    void* const stream = left.front()->stream;
    const auto end = std::stable_partition(left.begin(), left.end(),
                                           [stream](const auto& operation) { return operation->stream == stream; });
    const std::vector<std::shared_ptr<Operation>> together(left.begin(), end);
    left.erase(left.begin(), end);
    const Access access = access_of(together);
    const Load load = load_of(together);
    Work work = [together] { return advance(together); };
    const char* const name = name_of(together.front()->kind);
    emulated_count(name);
    emulated_enqueue(stream, name, &work, &access, &load);
  }
  return 0;
}

int submit(Operation operation) {
  operation.where = where_now();
  {
    const std::lock_guard<std::mutex> lock(mutex);
    Communicator& communicator = *operation.communicator;
    const auto peer = static_cast<size_t>(operation.peer);
    operation.turn = operation.kind == Collective::kSend      ? communicator.num_sent[peer]++
                     : operation.kind == Collective::kReceive ? communicator.num_received[peer]++
                                                              : communicator.num_collectives++;
  }
  const bool has_host_memory = operation.count > 0 && operation.input != nullptr &&
                               emulated_is_device_memory(operation.input) == 0;
  if (has_host_memory) emulated_kernel_failed("NCCL was given memory that is not a device's");
  grouped.push_back(std::make_shared<Operation>(operation));
  return group_depth > 0 ? 0 : flush();
}

int collective(Collective kind, const void* in, void* out, size_t count, int type, int reduction, int root,
               Communicator* communicator, void* stream) {
  return submit({kind, communicator, static_cast<const char*>(in), static_cast<char*>(out), count, type, reduction,
                 root, stream, ""});
}

void write_choice(const std::string& path, int color, int key) {
  const std::string partial = path + ".partial";
  if (std::FILE* file = std::fopen(partial.c_str(), "w")) {
    std::fprintf(file, "%d %d", color, key);
    std::fclose(file);
  }
  std::rename(partial.c_str(), path.c_str());
}

std::pair<int, int> read_choice(const std::string& path) {
  while (access(path.c_str(), F_OK) != 0) usleep(200);
  int color = -1, key = 0;
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    if (std::fscanf(file, "%d %d", &color, &key) != 2) color = -1;
    std::fclose(file);
  }
  return {color, key};
}

// In virtual time it matters which ranks share a node: each tells the others its rank in the program, as torchrun set
// it, and waits for theirs.
std::vector<int> places_of(const std::string& folder, int rank, int size) {
  if (!emulated_is_timed()) return {};
  const auto path_of = [&folder](int of) { return folder + "/place." + std::to_string(of); };
  const char* const place = std::getenv("RANK");
  write_choice(path_of(rank), place == nullptr ? rank : std::atoi(place), 0);
  std::vector<int> places;
  for (int other = 0; other < size; ++other) places.push_back(read_choice(path_of(other)).first);
  return places;
}

int make(Communicator** made, int size, const std::string& id, int rank) {
  const std::string folder = "/dev/shm/emulated_nccl_" + id;
  mkdir(folder.c_str(), 0700);
  if (size > 1) emulated_work_unattended();  // nobody waits for a rank that is alone
  emulated_on_hang(tell_waiting);
  emulated_count("ncclCommInit");
  const auto num_peers = static_cast<size_t>(size);
  *made = new Communicator{folder, id, rank, size, places_of(folder, rank, size), 0, 0,
                           std::vector<uint64_t>(num_peers), std::vector<uint64_t>(num_peers)};
  return 0;
}

// When the last rank leaves, nobody reads the files any more.
void remove_folder(const Communicator& communicator) {
  const std::string left = communicator.folder + "/left." + std::to_string(communicator.rank);
  if (std::FILE* file = std::fopen(left.c_str(), "w")) std::fclose(file);
  for (int rank = 0; rank < communicator.size; ++rank) {
    if (access((communicator.folder + "/left." + std::to_string(rank)).c_str(), F_OK) != 0) return;
  }
  if (DIR* const folder = opendir(communicator.folder.c_str())) {
    while (const dirent* entry = readdir(folder)) unlink((communicator.folder + "/" + entry->d_name).c_str());
    closedir(folder);
  }
  rmdir(communicator.folder.c_str());
}

}  // namespace

// For Python: `write` puts the calls of the program on this thread into `text`, a line each, and ends it with a zero.
EXPORTED void emulated_on_collective(void (*write)(char* text, int num_chars)) { write_where = write; }

EXPORTED int ncclGetVersion(int* version) { return *version = 22907, 0; }

EXPORTED int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  std::snprintf(id->text, sizeof id->text, "%08x%08x_%d", random(), random(), getpid());
  return 0;
}

EXPORTED int ncclCommInitRank(Communicator** made, int size, UniqueId id, int rank) {
  return make(made, size, id.text, rank);
}
EXPORTED int ncclCommInitRankConfig(Communicator** made, int size, UniqueId id, int rank, void*) {
  return make(made, size, id.text, rank);
}
EXPORTED int ncclCommInitRankScalable(Communicator** made, int size, int rank, int, UniqueId* ids, void*) {
  return make(made, size, ids[0].text, rank);
}

// Every rank tells the others its color and key, and waits for theirs, as NCCL's call does.
EXPORTED int ncclCommSplit(Communicator* parent, int color, int key, Communicator** made, void*) {
  const std::string name = "split" + std::to_string(parent->num_splits++);
  const auto path_of = [&](int rank) { return parent->folder + "/" + name + "." + std::to_string(rank); };
  write_choice(path_of(parent->rank), color, key);
  std::vector<std::pair<int, int>> members;  // key and old rank, which is also the order of the new ranks
  for (int rank = 0; rank < parent->size; ++rank) {
    const auto [its_color, its_key] = read_choice(path_of(rank));
    if (its_color == color) members.emplace_back(its_key, rank);
  }
  *made = nullptr;
  if (color < 0) return 0;
  std::sort(members.begin(), members.end());
  const auto mine = std::find(members.begin(), members.end(), std::pair(key, parent->rank));
  return make(made, static_cast<int>(members.size()), parent->id + "_" + name + "_" + std::to_string(color),
              static_cast<int>(mine - members.begin()));
}

EXPORTED int ncclCommFinalize(Communicator*) { return 0; }
EXPORTED int ncclCommDestroy(Communicator* communicator) { return remove_folder(*communicator), 0; }
// Gives up operations that hang; work behind them on a stream goes on.
EXPORTED int ncclCommAbort(Communicator* communicator) {
  communicator->is_aborted = true;
  return remove_folder(*communicator), 0;
}
EXPORTED int ncclCommGetAsyncError(Communicator*, int* error) { return *error = 0, 0; }
EXPORTED int ncclCommCount(Communicator* communicator, int* count) { return *count = communicator->size, 0; }
EXPORTED int ncclCommUserRank(Communicator* communicator, int* rank) { return *rank = communicator->rank, 0; }
EXPORTED const char* ncclGetErrorString(int) { return "error of the emulated NCCL"; }
EXPORTED const char* ncclGetLastError(Communicator*) { return ""; }

EXPORTED int ncclGroupStart() { return ++group_depth, 0; }
EXPORTED int ncclGroupEnd() { return --group_depth == 0 ? flush() : 0; }

EXPORTED int ncclAllReduce(const void* in, void* out, size_t count, int type, int reduction, Communicator* communicator,
                           void* stream) {
  return collective(Collective::kAllReduce, in, out, count, type, reduction, 0, communicator, stream);
}
EXPORTED int ncclReduce(const void* in, void* out, size_t count, int type, int reduction, int root,
                        Communicator* communicator, void* stream) {
  return collective(Collective::kReduce, in, out, count, type, reduction, root, communicator, stream);
}
EXPORTED int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Communicator* communicator,
                           void* stream) {
  return collective(Collective::kBroadcast, in, out, count, type, 0, root, communicator, stream);
}
EXPORTED int ncclBcast(void* data, size_t count, int type, int root, Communicator* communicator, void* stream) {
  return collective(Collective::kBroadcast, data, data, count, type, 0, root, communicator, stream);
}
EXPORTED int ncclAllGather(const void* in, void* out, size_t count, int type, Communicator* communicator,
                           void* stream) {
  return collective(Collective::kAllGather, in, out, count, type, 0, 0, communicator, stream);
}
EXPORTED int ncclReduceScatter(const void* in, void* out, size_t count, int type, int reduction,
                               Communicator* communicator, void* stream) {
  return collective(Collective::kReduceScatter, in, out, count, type, reduction, 0, communicator, stream);
}
EXPORTED int ncclAlltoAll(const void* in, void* out, size_t count, int type, Communicator* communicator, void* stream) {
  return collective(Collective::kAllToAll, in, out, count, type, 0, 0, communicator, stream);
}
EXPORTED int ncclSend(const void* in, size_t count, int type, int peer, Communicator* communicator, void* stream) {
  return collective(Collective::kSend, in, nullptr, count, type, 0, peer, communicator, stream);
}
EXPORTED int ncclRecv(void* out, size_t count, int type, int peer, Communicator* communicator, void* stream) {
  return collective(Collective::kReceive, nullptr, out, count, type, 0, peer, communicator, stream);
}
