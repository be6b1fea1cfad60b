// SPDX-License-Identifier: Apache-2.0
// Registers the exchange kernels as torch operators, on libtorch's stable ABI, and makes the library a Python module
// on the limited API. The Python side that composes their arguments is afd_plugin/connectors/exchange_ops.py.

#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <optional>

#include "exchange.h"

namespace {

using torch::stable::Tensor;
using Integers = torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;

constexpr size_t kPushFields = 9;
constexpr size_t kWaitFields = 3;
constexpr size_t kGatherFields = 3;

template <typename T>
T* address(int64_t value) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(value));
}

cudaStream_t stream_of(const Tensor& tensor) {
  auto stream = torch::stable::accelerator::getCurrentStream(tensor.get_device_index());
  return static_cast<cudaStream_t>(stream.nativeHandle());
}

void check(cudaError_t error, const char* operation) {
  STD_TORCH_CHECK(error == cudaSuccess, "afd_plugin::", operation, " could not be launched: ", cudaGetErrorString(error));
}

int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

unsigned int* cell_of(const Tensor& state, int64_t cell) {
  const int64_t cells = state.numel() / afd::kCellWords;
  STD_TORCH_CHECK(cell > 0 && cell < cells, "cell ", cell, " does not exist; the state has ", cells, ".");
  return static_cast<unsigned int*>(state.mutable_data_ptr()) + cell * afd::kCellWords;
}

afd::Segment part(const Tensor& tensor, int64_t offset, int64_t bytes, int64_t target) {
  STD_TORCH_CHECK(
      offset >= 0 && bytes >= 0 && offset + bytes <= bytes_of(tensor), "bytes ", offset, " to ", offset + bytes,
      " were asked of a tensor of ", bytes_of(tensor), " bytes.");
  return {static_cast<const unsigned char*>(tensor.const_data_ptr()) + offset, address<unsigned char>(target), bytes};
}

void count_of(size_t length, size_t fields, size_t limit, const char* operation) {
  STD_TORCH_CHECK(
      length > 0 && length % fields == 0 && length / fields <= limit, "afd_plugin::", operation, " takes 1 to ", limit,
      " groups of ", fields, " integers; got ", length, " integers.");
}

// peers: per receiver payload offset, payload bytes, target address, extra offset, extra bytes, extra target address,
// address of the arrival word, cell, tag.
void push(
    const Tensor& state, const Tensor& payload, const std::optional<Tensor>& extra, Integers peers, int64_t counter,
    bool same_gpu) {
  count_of(peers.size(), kPushFields, afd::kMaxPeers, "push");
  STD_TORCH_CHECK(payload.is_contiguous(), "the payload of afd_plugin::push must be contiguous.");
  STD_TORCH_CHECK(!extra || extra->is_contiguous(), "the extra payload of afd_plugin::push must be contiguous.");
  afd::Push push{};
  const int count = static_cast<int>(peers.size() / kPushFields);
  for (int peer = 0; peer < count; ++peer) {
    const int64_t* fields = peers.data() + peer * kPushFields;
    afd::PushPeer& target = push.peers[peer];
    target.segments[0] = part(payload, fields[0], fields[1], fields[2]);
    if (fields[4] != 0) {
      STD_TORCH_CHECK(extra.has_value(), "afd_plugin::push was given no extra payload to send.");
      target.segments[1] = part(*extra, fields[3], fields[4], fields[5]);
    }
    target.arrived = address<uint64_t>(fields[6]);
    target.cell = cell_of(state, fields[7]);
    target.tag = static_cast<unsigned int>(fields[8]);
  }
  push.poisoned = static_cast<const unsigned int*>(state.const_data_ptr());
  push.counter = address<unsigned long long>(counter);
  push.same_gpu = same_gpu;
  check(afd::push(push, count, stream_of(state)), "push");
}

// sources: per sender address of the arrival word, cell, tag.
void wait(const Tensor& state, int64_t control, Integers sources, int64_t counter) {
  count_of(sources.size(), kWaitFields, afd::kMaxPeers, "wait");
  afd::Wait wait{};
  wait.count = static_cast<int>(sources.size() / kWaitFields);
  for (int source = 0; source < wait.count; ++source) {
    const int64_t* fields = sources.data() + source * kWaitFields;
    wait.sources[source] = {
        address<const uint64_t>(fields[0]), cell_of(state, fields[1]), static_cast<unsigned int>(fields[2])};
  }
  wait.control = address<afd::Control>(control);
  wait.poisoned = static_cast<unsigned int*>(state.mutable_data_ptr());
  wait.counter = address<unsigned long long>(counter);
  check(afd::wait(wait, stream_of(state)), "wait");
}

// segments: per run of bytes source address, offset in out, bytes.
void gather(const Tensor& out, Integers segments) {
  count_of(segments.size(), kGatherFields, afd::kMaxSegments, "gather");
  STD_TORCH_CHECK(out.is_contiguous(), "the output of afd_plugin::gather must be contiguous.");
  afd::Gather gather{};
  gather.count = static_cast<int>(segments.size() / kGatherFields);
  for (int index = 0; index < gather.count; ++index) {
    const int64_t* fields = segments.data() + index * kGatherFields;
    STD_TORCH_CHECK(
        fields[1] >= 0 && fields[2] >= 0 && fields[1] + fields[2] <= bytes_of(out), "bytes ", fields[1], " to ",
        fields[1] + fields[2], " do not fit an output of ", bytes_of(out), " bytes.");
    gather.segments[index] = {
        address<const unsigned char>(fields[0]), static_cast<unsigned char*>(out.mutable_data_ptr()) + fields[1],
        fields[2]};
  }
  check(afd::gather(gather, stream_of(out)), "gather");
}

afd::Element element_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return afd::Element::kFloat;
    case ScalarType::Half:
      return afd::Element::kHalf;
    case ScalarType::BFloat16:
      return afd::Element::kBFloat16;
    default:
      STD_TORCH_CHECK(false, "afd_plugin::combine adds float32, float16 and bfloat16 only.");
  }
}

// sources: addresses of partial sums of the shape and type of out.
void combine(const Tensor& out, Integers sources) {
  count_of(sources.size(), 1, afd::kMaxPeers, "combine");
  STD_TORCH_CHECK(out.is_contiguous(), "the output of afd_plugin::combine must be contiguous.");
  afd::Combine combine{};
  combine.count = static_cast<int>(sources.size());
  for (int source = 0; source < combine.count; ++source) combine.sources[source] = address<const void>(sources[source]);
  combine.target = out.mutable_data_ptr();
  combine.elements = out.numel();
  combine.element = element_of(out);
  check(afd::combine(combine, stream_of(out)), "combine");
}

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "CUDA kernels of afd_plugin, registered as torch operators.", -1,
                          nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

STABLE_TORCH_LIBRARY(afd_plugin, library) {
  library.def("push(Tensor(a!) state, Tensor payload, Tensor? extra, int[] peers, int counter, bool same_gpu) -> ()");
  library.def("wait(Tensor(a!) state, int control, int[] sources, int counter) -> ()");
  library.def("gather(Tensor(a!) out, int[] segments) -> ()");
  library.def("combine(Tensor(a!) out, int[] sources) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(afd_plugin, CUDA, library) {
  library.impl("push", TORCH_BOX(&push));
  library.impl("wait", TORCH_BOX(&wait));
  library.impl("gather", TORCH_BOX(&gather));
  library.impl("combine", TORCH_BOX(&combine));
}

PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&definition); }
