// SPDX-License-Identifier: Apache-2.0
// What the exchange kernels are told, and their launchers. Plain data: no torch, no Python.
//
// A peer's arena is memory of another process (or of another GPU) that is mapped here. A message is copied there by
// stores, then announced by one 64-bit store with release semantics at system scope: the low word is a sequence
// number, the high word a tag that names the message. Sequence numbers live in device memory and only grow, so a
// captured graph replays without any reset.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace afd {

constexpr int kMaxPeers = 8;
constexpr int kMaxSegments = 16;
constexpr int kCellWords = 32;  // one cell of the state tensor is 128 bytes: sent, taken, ticket, padding

// Words of a cell; cell 0 belongs to the connector itself, and its first word says that a wait was aborted.
enum CellWord : int { kSent = 0, kTaken = 1, kTicket = 2 };

// A run of bytes copied from this process into a peer's arena.
struct Segment {
  const unsigned char* source;
  unsigned char* target;
  int64_t bytes;
};

// One receiver of a push.
struct PushPeer {
  Segment segments[2];      // hidden states and router logits; bytes == 0 where there are none
  uint64_t* arrived;        // the word in the peer's memory that announces the message
  unsigned int* cell;       // this connector's own counters for that peer and stage
  unsigned int tag;
};

struct Push {
  PushPeer peers[kMaxPeers];
  const unsigned int* poisoned;  // non-zero: a wait was aborted, nothing may be announced any more
  unsigned long long* counter;   // incremented once, or null
  bool same_gpu;                 // every receiver is a process on this GPU
};

// One sender that a wait expects.
struct WaitSource {
  const uint64_t* arrived;
  unsigned int* cell;
  unsigned int tag;
};

// Words of the host memory that waits poll and report to.
struct Control {
  unsigned long long abort;   // non-zero: stop waiting
  unsigned long long fault;   // non-zero: what arrived in the place of the expected message
};

struct Wait {
  WaitSource sources[kMaxPeers];
  int count;
  Control* control;
  unsigned int* poisoned;
  unsigned long long* counter;
};

struct Gather {
  Segment segments[kMaxSegments];
  int count;
};

enum class Element : int { kFloat, kHalf, kBFloat16 };

struct Combine {
  const void* sources[kMaxPeers];
  int count;
  void* target;
  int64_t elements;
  Element element;
};

cudaError_t push(const Push& push, int peers, cudaStream_t stream);
cudaError_t wait(const Wait& wait, cudaStream_t stream);
cudaError_t gather(const Gather& gather, cudaStream_t stream);
cudaError_t combine(const Combine& combine, cudaStream_t stream);

}  // namespace afd
