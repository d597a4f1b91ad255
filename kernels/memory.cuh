// Every access whose order or scope matters, named by it; nothing else in kernels/ spells an order.
//
// Payload is moved by plain 16-byte loads and stores: ordered by the flag's release and acquire and the block's
// barriers, and never through the non-coherent path (the SASS contract checks it).
#pragma once

#include "layout.h"

namespace peersum {

// 16 bytes of a tensor or a slot.
struct alignas(16) Pack {
  uint32_t words[4];
};

// An address of global memory. The assumption makes the compiler emit LDG and STG, not generic accesses.
template <typename T>
__device__ __forceinline__ T* global(uint64_t address) {
  T* pointer = reinterpret_cast<T*>(address);
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

__device__ __forceinline__ Pack load_pack(const Pack* from) {
  __builtin_assume(__isGlobal(from));
  const uint4 loaded = *reinterpret_cast<const uint4*>(from);
  return Pack{{loaded.x, loaded.y, loaded.z, loaded.w}};
}

__device__ __forceinline__ void store_pack(Pack* to, const Pack& pack) {
  __builtin_assume(__isGlobal(to));
  *reinterpret_cast<uint4*>(to) = make_uint4(pack.words[0], pack.words[1], pack.words[2], pack.words[3]);
}

__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_relaxed_sys(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_sys(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Orders everything this thread, and by a preceding block barrier this block, has done before it.
__device__ __forceinline__ void store_release_sys(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ void store_release_sys(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// After a relaxed load that saw a released value, makes what was released visible: cheaper than an acquire a spin.
__device__ __forceinline__ void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Nanoseconds of a clock that all SMs of a device share.
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

}  // namespace peersum
