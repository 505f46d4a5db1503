#include "operation.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace emulated {
namespace {

// A rank may post its next collectives before the others have read the last one; beyond this they surely have.
constexpr uint64_t kKeptTurns = 64;

struct Header {  // of every file: what the poster thinks is going on
  uint64_t kind, count, type, reduction, peer;
};

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

bool is_message(Collective kind) { return kind == Collective::kSend || kind == Collective::kReceive; }

std::string described(uint64_t kind, uint64_t count, uint64_t type) {
  return std::string(name_of(static_cast<Collective>(kind))) + " of " + std::to_string(count) +
         " elements of ncclDataType_t " + std::to_string(type);
}

}  // namespace

const char* name_of(Collective kind) {
  static const char* const names[] = {"ncclAllReduce",     "ncclReduce", "ncclBroadcast", "ncclAllGather",
                                      "ncclReduceScatter", "ncclSend",   "ncclRecv"};
  return names[static_cast<size_t>(kind)];
}

size_t Operation::input_bytes() const {
  const size_t parts = kind == Collective::kReduceScatter ? static_cast<size_t>(communicator->size) : 1;
  return count * parts * type_bytes(type);
}

size_t Operation::output_bytes() const {
  const size_t parts = kind == Collective::kAllGather ? static_cast<size_t>(communicator->size) : 1;
  return count * parts * type_bytes(type);
}

bool Operation::advance() {
  if (is_done || communicator->is_aborted) return true;
  if (kind == Collective::kSend) return is_done = advance_send();
  if (kind == Collective::kReceive) return is_done = advance_receive();
  return is_done = advance_collective();
}

bool Operation::advance_send() {
  if (!is_posted) {
    post(path_of_message(), input, input_bytes());
    is_posted = true;
  }
  return !exists(path_of_message());  // the receiver removes it
}

bool Operation::advance_receive() {
  const std::string path = path_of_message();
  if (!exists(path)) return false;
  const std::vector<char> data = read(path);
  std::memcpy(output, data.data(), std::min(data.size(), output_bytes()));
  unlink(path.c_str());
  return true;
}

bool Operation::advance_collective() {
  const int rank = communicator->rank;
  if (!is_posted) {
    const bool has_nothing = kind == Collective::kBroadcast && rank != peer;
    post(path_of_part(turn, rank), input, has_nothing ? 0 : input_bytes());
    is_posted = true;
  }
  for (int other = 0; other < communicator->size; ++other) {
    if (!exists(path_of_part(turn, other))) return false;
  }
  std::vector<std::vector<char>> parts;
  for (int other = 0; other < communicator->size; ++other) parts.push_back(read(path_of_part(turn, other)));
  combine(parts);
  // All ranks have posted this one, so all are done with those long before it.
  if (turn >= kKeptTurns) unlink(path_of_part(turn - kKeptTurns, rank).c_str());
  return true;
}

void Operation::combine(const std::vector<std::vector<char>>& parts) {
  const auto rank = static_cast<size_t>(communicator->rank);
  for (const std::vector<char>& part : parts) {
    const bool may_be_empty = kind == Collective::kBroadcast;
    if (part.size() != input_bytes() && !may_be_empty) return;  // the ranks disagree, and read() said so
  }
  switch (kind) {
    case Collective::kAllReduce: return reduce(parts, 0, output, count, type, reduction);
    case Collective::kReduceScatter: return reduce(parts, rank * count, output, count, type, reduction);
    case Collective::kReduce:
      if (communicator->rank == peer) reduce(parts, 0, output, count, type, reduction);
      return;
    case Collective::kBroadcast: {
      const std::vector<char>& root = parts[static_cast<size_t>(peer)];
      std::memmove(output, root.data(), std::min(root.size(), output_bytes()));
      return;
    }
    default:
      for (size_t other = 0; other < parts.size(); ++other) {
        std::memmove(output + other * input_bytes(), parts[other].data(), input_bytes());
      }
  }
}

// Under another name first, so that nobody reads half of it.
void Operation::post(const std::string& path, const char* data, size_t num_bytes) const {
  const std::string partial = path + ".partial";
  std::FILE* const file = std::fopen(partial.c_str(), "wb");
  if (file == nullptr) return emulated_kernel_failed(("NCCL: " + partial + " cannot be written").c_str());
  const Header header{static_cast<uint64_t>(kind), count, static_cast<uint64_t>(type),
                      static_cast<uint64_t>(reduction), static_cast<uint64_t>(peer)};
  std::fwrite(&header, sizeof header, 1, file);
  if (num_bytes > 0) std::fwrite(data, 1, num_bytes, file);
  if (std::fclose(file) != 0) emulated_kernel_failed(("NCCL: " + partial + " cannot be written").c_str());
  std::rename(partial.c_str(), path.c_str());
}

// The data of another rank, after a look at whether it is in the same operation.
std::vector<char> Operation::read(const std::string& path) const {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  Header header{};
  std::vector<char> data;
  if (file == nullptr || std::fread(&header, sizeof header, 1, file) != 1) {
    emulated_kernel_failed(("NCCL: " + path + " cannot be read").c_str());
  } else {
    std::fseek(file, 0, SEEK_END);
    data.resize(static_cast<size_t>(std::ftell(file)) - sizeof header);
    std::fseek(file, sizeof header, SEEK_SET);
    if (std::fread(data.data(), 1, data.size(), file) != data.size()) {
      emulated_kernel_failed(("NCCL: " + path + " cannot be read").c_str());
    }
  }
  if (file != nullptr) std::fclose(file);
  const bool same_kind = is_message(kind) || (header.kind == static_cast<uint64_t>(kind) &&
                                              header.peer == static_cast<uint64_t>(peer));
  if (!same_kind || header.count != count || header.type != static_cast<uint64_t>(type)) {
    emulated_kernel_failed(("NCCL: ranks disagree on operation " + std::to_string(turn) + " of communicator " +
                            communicator->id + ": rank " + std::to_string(communicator->rank) + " calls " +
                            described(static_cast<uint64_t>(kind), count, static_cast<uint64_t>(type)) +
                            ", another " + described(header.kind, header.count, header.type))
                               .c_str());
  }
  return data;
}

std::string Operation::path_of_part(uint64_t turn, int rank) const {
  return communicator->folder + "/" + std::to_string(turn) + "." + std::to_string(rank);
}

std::string Operation::path_of_message() const {
  const int from = kind == Collective::kSend ? communicator->rank : peer;
  const int to = kind == Collective::kSend ? peer : communicator->rank;
  return communicator->folder + "/from" + std::to_string(from) + "to" + std::to_string(to) + "." + std::to_string(turn);
}

}  // namespace emulated
