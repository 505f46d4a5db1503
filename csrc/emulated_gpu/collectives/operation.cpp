#include "operation.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <utility>

namespace emulated {
namespace {

// A rank may post its next collectives before the others have read the last one. A file that is this many turns old has
// been read by all.
constexpr uint64_t kKeptTurns = 64;

struct Header {  // of every file: the operation that the posting rank is in; its calls and its data follow
  uint64_t kind, count, type, reduction, peer, where_bytes;
  double here_s;
};

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

bool is_message(Collective kind) { return kind == Collective::kSend || kind == Collective::kReceive; }

std::string described(uint64_t kind, uint64_t count, uint64_t type) {
  return std::string(name_of(static_cast<Collective>(kind))) + " of " + std::to_string(count) +
         " elements of ncclDataType_t " + std::to_string(type);
}

// Writes under another name first, so that nobody reads half of the file.
bool write_whole(const std::string& path, std::initializer_list<std::pair<const void*, size_t>> pieces) {
  const std::string partial = path + ".partial";
  std::FILE* const file = std::fopen(partial.c_str(), "wb");
  if (file == nullptr) return false;
  for (const auto& [data, num_bytes] : pieces) {
    if (num_bytes > 0) std::fwrite(data, 1, num_bytes, file);
  }
  return std::fclose(file) == 0 && std::rename(partial.c_str(), path.c_str()) == 0;
}

void cannot_write(const std::string& path) {
  emulated_kernel_failed(("NCCL: " + path + " cannot be written").c_str());
}

std::string called_at(const std::string& where) { return where.empty() ? "\n" : ", called at\n" + where; }

}  // namespace

const char* name_of(Collective kind) {
  static const char* const names[] = {"ncclAllReduce",     "ncclReduce", "ncclBroadcast", "ncclAllGather",
                                      "ncclReduceScatter", "ncclAlltoAll", "ncclSend", "ncclRecv"};
  return names[static_cast<size_t>(kind)];
}

size_t Operation::input_bytes() const {
  const bool has_parts = kind == Collective::kReduceScatter || kind == Collective::kAllToAll;
  return count * (has_parts ? static_cast<size_t>(communicator->size) : 1) * type_bytes(type);
}

size_t Operation::output_bytes() const {
  const bool has_parts = kind == Collective::kAllGather || kind == Collective::kAllToAll;
  return count * (has_parts ? static_cast<size_t>(communicator->size) : 1) * type_bytes(type);
}

size_t Operation::posted_bytes() const { return emulated_has_numbers(input_bytes()) ? input_bytes() : 0; }

// A broadcast and a reduction pass the data along the ring of an all-gather or a reduce-scatter. The larger end counts.
double Operation::modelled_s() const {
  const auto& places = communicator->places;
  if (places.size() < 2) return 0;
  const auto here = static_cast<size_t>(communicator->rank), there = static_cast<size_t>(peer);
  const double num_ranks = is_message(kind) ? 2 : static_cast<double>(places.size());
  const double stride = is_message(kind) ? std::abs(places[here] - places[there])
                                         : (places.back() - places.front()) / (num_ranks - 1);
  const auto num_bytes = static_cast<double>(std::max(input_bytes(), output_bytes()));
  const char* const model = is_message(kind)                    ? "message"
                            : kind == Collective::kAllReduce ? "all_reduce"
                            : kind == Collective::kAllToAll  ? "all_to_all"
                                                             : "gather";
  const double sizes[] = {num_bytes, num_ranks, stride};
  return emulated_seconds(model, "", sizes, 3);
}

// Another rank came then.
void Operation::meet(double its_s) {
  if (meeting != nullptr) meeting->over_s = std::max(meeting->over_s, std::max(meeting->here_s, its_s) + seconds);
}

bool Operation::advance() {
  if (is_done || communicator->is_aborted) return true;
  if (!is_begun) begin();
  if (kind == Collective::kSend) return is_done = advance_send();
  if (kind == Collective::kReceive) return is_done = advance_receive();
  return is_done = advance_collective();
}

std::string Operation::described() const {
  return emulated::described(static_cast<uint64_t>(kind), count, static_cast<uint64_t>(type)) + ", number " +
         std::to_string(turn) + (is_message(kind) ? " with rank " + std::to_string(peer) : "") + called_at(where);
}

// The other ranks read it when they hang.
void Operation::begin() {
  is_begun = true;
  const std::string text = described();
  (void)write_whole(path_of_last(communicator->rank), {{text.data(), text.size()}});
}

std::string Operation::waiting() const {
  std::string text = "rank " + std::to_string(communicator->rank) + " of communicator " + communicator->id + " is in " +
                     described();
  for (int other = 0; other < communicator->size; ++other) {
    if (other == communicator->rank) continue;
    std::ifstream file(path_of_last(other));
    const std::string last((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    text += "  rank " + std::to_string(other) + " has begun last " + (last.empty() ? "nothing\n" : last);
  }
  return text;
}

bool Operation::advance_send() {
  if (!is_posted) {
    post(path_of_message(), input, posted_bytes());
    is_posted = true;
  }
  if (!exists(path_of_receipt())) return false;
  double its_s = 0;
  std::ifstream(path_of_receipt(), std::ios::binary).read(reinterpret_cast<char*>(&its_s), sizeof its_s);
  meet(its_s);
  unlink(path_of_receipt().c_str());
  return true;
}

bool Operation::advance_receive() {
  const std::string path = path_of_message();
  if (!exists(path)) return false;
  const std::vector<char> data = read(path);
  std::memcpy(output, data.data(), std::min(data.size(), output_bytes()));
  unlink(path.c_str());
  const double when_s = here_s();
  if (!write_whole(path_of_receipt(), {{&when_s, sizeof when_s}})) cannot_write(path_of_receipt());
  return true;
}

bool Operation::advance_collective() {
  const int rank = communicator->rank;
  if (!is_posted) {
    const bool has_nothing = kind == Collective::kBroadcast && rank != peer;
    post(path_of_part(turn, rank), input, has_nothing ? 0 : posted_bytes());
    is_posted = true;
  }
  for (int other = 0; other < communicator->size; ++other) {
    if (!exists(path_of_part(turn, other))) return false;
  }
  std::vector<std::vector<char>> parts;
  for (int other = 0; other < communicator->size; ++other) parts.push_back(read(path_of_part(turn, other)));
  combine(parts);
  const Range written = bytes_at(output, output_bytes());
  emulated_set_absent(&written, false);
  // All ranks have posted this one, so all have finished those long before it.
  if (turn >= kKeptTurns) unlink(path_of_part(turn - kKeptTurns, rank).c_str());
  return true;
}

void Operation::combine(const std::vector<std::vector<char>>& parts) {
  const auto rank = static_cast<size_t>(communicator->rank);
  for (const std::vector<char>& part : parts) {
    const bool may_be_empty = kind == Collective::kBroadcast;
    if (part.size() != input_bytes() && !may_be_empty) return;  // no numbers; or the ranks disagree, and read() said so
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
    case Collective::kAllToAll: {
      const size_t part_bytes = count * type_bytes(type);
      for (size_t other = 0; other < parts.size(); ++other) {
        std::memmove(output + other * part_bytes, parts[other].data() + rank * part_bytes, part_bytes);
      }
      return;
    }
    default:
      for (size_t other = 0; other < parts.size(); ++other) {
        std::memmove(output + other * input_bytes(), parts[other].data(), input_bytes());
      }
  }
}

void Operation::post(const std::string& path, const char* data, size_t num_bytes) const {
  const Header header{static_cast<uint64_t>(kind), count, static_cast<uint64_t>(type),
                      static_cast<uint64_t>(reduction), static_cast<uint64_t>(peer), where.size(), here_s()};
  if (!write_whole(path, {{&header, sizeof header}, {where.data(), where.size()}, {data, num_bytes}})) cannot_write(path);
}

// The data of another rank, after a check that it is in the same operation.
std::vector<char> Operation::read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  Header header{};
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  std::string its_where(header.where_bytes, ' ');
  file.read(its_where.data(), static_cast<std::streamsize>(its_where.size()));
  const auto begin = file.tellg();
  file.seekg(0, std::ios::end);
  std::vector<char> data(file ? static_cast<size_t>(file.tellg() - begin) : 0);
  file.seekg(begin);
  file.read(data.data(), static_cast<std::streamsize>(data.size()));
  if (!file) emulated_kernel_failed(("NCCL: " + path + " cannot be read").c_str());
  const bool same_kind = is_message(kind) || (header.kind == static_cast<uint64_t>(kind) &&
                                              header.peer == static_cast<uint64_t>(peer));
  if (!same_kind || header.count != count || header.type != static_cast<uint64_t>(type)) {
    emulated_kernel_failed(("NCCL: ranks disagree on operation " + std::to_string(turn) + " of communicator " +
                            communicator->id + ": rank " + std::to_string(communicator->rank) + " calls " +
                            described() + "  another " +
                            emulated::described(header.kind, header.count, header.type) + called_at(its_where))
                               .c_str());
  }
  meet(header.here_s);
  return data;
}

std::string Operation::path_of_part(uint64_t turn, int rank) const {
  return communicator->folder + "/" + std::to_string(turn) + "." + std::to_string(rank);
}

std::string Operation::path_of_last(int rank) const {
  return communicator->folder + "/last." + std::to_string(rank);
}

std::string Operation::path_of_message() const {
  const int from = kind == Collective::kSend ? communicator->rank : peer;
  const int to = kind == Collective::kSend ? peer : communicator->rank;
  return communicator->folder + "/from" + std::to_string(from) + "to" + std::to_string(to) + "." + std::to_string(turn);
}

}  // namespace emulated
