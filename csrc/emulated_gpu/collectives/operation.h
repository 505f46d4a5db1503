// One operation of a communicator, carried out among the processes of one machine.
//
// A collective posts this rank's part as a file, and is done when it has read the parts of all ranks. A send is done
// when there is a receipt of its message. Nothing is buffered, as NCCL promises no buffering, so ranks that wait for
// one another in a circle hang here, too. The files are in a folder of the communicator in memory (/dev/shm).
//
// In virtual time a collective begins when the last rank reaches it, and a message when both ranks have reached it:
// each file contains the time at which its rank reached the operation.
//
// Each file begins with the operation that its rank is in and the place where its program called it: errors about ranks
// that disagree, or that wait for each other for ever, show the calls of both sides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../runtime/emulator.h"

namespace emulated {

enum class Collective : uint64_t { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kAllToAll, kSend, kReceive };

const char* name_of(Collective kind);

struct Communicator {
  std::string folder;
  std::string id;
  int rank;
  int size;
  std::vector<int> places;  // of its ranks among all of the program, in virtual time alone
  uint64_t num_collectives = 0;
  uint64_t num_splits = 0;
  std::vector<uint64_t> num_sent;      // by peer
  std::vector<uint64_t> num_received;  // by peer

  bool is_aborted = false;
};

struct Operation {
  Collective kind;
  Communicator* communicator;
  const char* input;
  char* output;
  size_t count;  // elements, as NCCL's call counts them
  int type;      // ncclDataType_t
  int reduction;  // ncclRedOp_t
  int peer;      // root of reduce and broadcast, other side of send and receive
  void* stream;
  std::string where;  // the calls that led to it, innermost first, a line each; empty: they were not requested
  std::shared_ptr<Meeting> meeting;  // in virtual time; shared by the operations of a group
  double seconds = 0;                // in virtual time, after all ranks have come
  uint64_t turn = 0;  // which collective of the communicator, or which message of the pair
  bool is_begun = false;
  bool is_posted = false;
  bool is_done = false;

  size_t input_bytes() const;
  size_t output_bytes() const;
  // The bytes of the input that are sent: none if it has no numbers.
  size_t posted_bytes() const;
  // Its virtual time, by the model of the hardware.
  double modelled_s() const;
  // Continues as far as it can without waiting. Returns whether it is done.
  bool advance();
  // A description for messages: the operation and where it was called.
  std::string described() const;
  // A description of where this rank waits, and of the last operation that each other rank of the communicator began.
  std::string waiting() const;

 private:
  void begin();
  bool advance_send();
  bool advance_receive();
  bool advance_collective();
  void combine(const std::vector<std::vector<char>>& parts);
  void post(const std::string& path, const char* data, size_t num_bytes) const;
  std::vector<char> read(const std::string& path);
  void meet(double its_s);
  double here_s() const { return meeting == nullptr ? 0 : meeting->here_s; }
  std::string path_of_part(uint64_t turn, int rank) const;
  std::string path_of_message() const;
  std::string path_of_receipt() const { return path_of_message() + ".receipt"; }
  std::string path_of_last(int rank) const;
};

size_t type_bytes(int type);
// out[i] = the reduction over parts of part[offset + i]; `count` elements.
void reduce(const std::vector<std::vector<char>>& parts, size_t offset, char* out, size_t count, int type,
            int reduction);

}  // namespace emulated
