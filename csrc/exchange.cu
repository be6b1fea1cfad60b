// SPDX-License-Identifier: Apache-2.0
// Kernels of the one-host exchange: push, wait, gather, combine. See exchange.h for the protocol.

#include "exchange.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace afd {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;
// Half of what a turn could move: more blocks share a message of middling size.
constexpr int kBytesPerBlock = kThreads * kUnroll * 16 / 2;
// About one block per multiprocessor: enough to fill a link or the memory of one GPU.
constexpr int kMaxBlocks = 128;
constexpr unsigned int kPollsPerAbortCheck = 1024;

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// A peer on the same GPU sees what this GPU's memory holds; only one elsewhere needs the wider, slower scope.
template <bool kSameGpu>
__device__ __forceinline__ void store_release(uint64_t* word, uint64_t value) {
  if constexpr (kSameGpu) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  } else {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
}

// One more block is done with its part; how many were before it. Releases what this block wrote and acquires what they
// did, so the last one may announce all of it by its own release. The blocks run on one GPU, whatever the peer's.
__device__ __forceinline__ unsigned int take_ticket(unsigned int* word) {
  unsigned int before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(word) : "memory");
  return before;
}

__device__ __forceinline__ bool aligned(const Segment& segment) {
  return ((reinterpret_cast<uintptr_t>(segment.source) | reinterpret_cast<uintptr_t>(segment.target)) & 15) == 0;
}

// Copies a segment with all threads of the blocks that share blockIdx.y.
__device__ void copy(const Segment& segment) {
  const int64_t thread = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t vectors = aligned(segment) ? segment.bytes / 16 : 0;
  const uint4* source = reinterpret_cast<const uint4*>(segment.source);
  uint4* target = reinterpret_cast<uint4*>(segment.target);
  // All loads of a turn are under way before the first store, also in a last turn that is not full.
  for (int64_t index = thread; index < vectors; index += kUnroll * threads) {
    uint4 held[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      if (index + step * threads < vectors) held[step] = __ldcg(source + index + step * threads);
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      if (index + step * threads < vectors) target[index + step * threads] = held[step];
    }
  }
  for (int64_t byte = vectors * 16 + thread; byte < segment.bytes; byte += threads) {
    segment.target[byte] = segment.source[byte];
  }
}

template <bool kSameGpu>
__global__ void __launch_bounds__(kThreads) push_kernel(const __grid_constant__ Push push) {
  const PushPeer& peer = push.peers[blockIdx.y];
  const unsigned int poisoned = threadIdx.x == 0 ? *push.poisoned : 0;
  copy(peer.segments[0]);
  if (peer.segments[1].bytes) copy(peer.segments[1]);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1) {
    if (take_ticket(peer.cell + kTicket) != gridDim.x - 1) return;
    peer.cell[kTicket] = 0;
  }
  const unsigned int sequence = peer.cell[kSent] + 1;
  peer.cell[kSent] = sequence;
  if (push.counter != nullptr && blockIdx.y == 0) *push.counter += 1;
  if (poisoned) return;
  store_release<kSameGpu>(peer.arrived, static_cast<uint64_t>(peer.tag) << 32 | sequence);
}

// One thread per source. Ends early, and poisons every later push, when the host asks for it.
__global__ void __launch_bounds__(32) wait_kernel(const __grid_constant__ Wait wait) {
  if (threadIdx.x == 0 && wait.counter != nullptr) *wait.counter += 1;
  if (threadIdx.x >= wait.count) return;
  const WaitSource& source = wait.sources[threadIdx.x];
  const unsigned int expected = source.cell[kTaken] + 1;
  const volatile unsigned long long* abort = &wait.control->abort;
  uint64_t seen = load_acquire(source.arrived);
  for (unsigned int polls = 1; static_cast<int>(static_cast<unsigned int>(seen) - expected) < 0; ++polls) {
    if (polls % kPollsPerAbortCheck == 0 && *abort != 0) {
      *wait.poisoned = 1;
      return;
    }
    seen = load_acquire(source.arrived);
  }
  source.cell[kTaken] = expected;
  if (seen != (static_cast<uint64_t>(source.tag) << 32 | expected)) {
    *wait.poisoned = 1;
    *reinterpret_cast<volatile unsigned long long*>(&wait.control->fault) = seen | 1ull << 63;
    __threadfence_system();
  }
}

__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ Gather gather) {
  copy(gather.segments[blockIdx.y]);
}

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
template <typename T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ float narrow<float>(float value) { return value; }
template <>
__device__ __forceinline__ __half narrow<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }

// Adds the partial sums in float32, in the order of the sources, and rounds once.
template <typename T>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ Combine combine) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  T* target = static_cast<T*>(combine.target);
  for (int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; index < combine.elements;
       index += threads) {
    float sum = 0.0f;
    for (int source = 0; source < combine.count; ++source) {
      sum += widen(static_cast<const T*>(combine.sources[source])[index]);
    }
    target[index] = narrow<T>(sum);
  }
}

int blocks_for(int64_t bytes) {
  const int64_t blocks = (bytes + kBytesPerBlock - 1) / kBytesPerBlock;
  return static_cast<int>(blocks < 1 ? 1 : blocks > kMaxBlocks ? kMaxBlocks : blocks);
}

int64_t largest(const Segment& first, const Segment& second) {
  return first.bytes > second.bytes ? first.bytes : second.bytes;
}

}  // namespace

cudaError_t push(const Push& push, int peers, cudaStream_t stream) {
  int64_t bytes = 0;
  for (int peer = 0; peer < peers; ++peer) {
    const int64_t own = largest(push.peers[peer].segments[0], push.peers[peer].segments[1]);
    bytes = own > bytes ? own : bytes;
  }
  const dim3 blocks(blocks_for(bytes), peers);
  if (push.same_gpu) {
    push_kernel<true><<<blocks, kThreads, 0, stream>>>(push);
  } else {
    push_kernel<false><<<blocks, kThreads, 0, stream>>>(push);
  }
  return cudaGetLastError();
}

cudaError_t wait(const Wait& wait, cudaStream_t stream) {
  wait_kernel<<<1, 32, 0, stream>>>(wait);
  return cudaGetLastError();
}

cudaError_t gather(const Gather& gather, cudaStream_t stream) {
  int64_t bytes = 0;
  for (int segment = 0; segment < gather.count; ++segment) {
    bytes = gather.segments[segment].bytes > bytes ? gather.segments[segment].bytes : bytes;
  }
  gather_kernel<<<dim3(blocks_for(bytes), gather.count), kThreads, 0, stream>>>(gather);
  return cudaGetLastError();
}

cudaError_t combine(const Combine& combine, cudaStream_t stream) {
  const int64_t width = combine.element == Element::kFloat ? 4 : 2;
  const int blocks = blocks_for(combine.elements * width);
  switch (combine.element) {
    case Element::kFloat:
      combine_kernel<float><<<blocks, kThreads, 0, stream>>>(combine);
      break;
    case Element::kHalf:
      combine_kernel<__half><<<blocks, kThreads, 0, stream>>>(combine);
      break;
    case Element::kBFloat16:
      combine_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(combine);
      break;
  }
  return cudaGetLastError();
}

}  // namespace afd
