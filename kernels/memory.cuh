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

// A word that only this rank's kernels use, one after the other; from L2, since the last one may have run elsewhere.
__device__ __forceinline__ uint32_t load_word(const uint32_t* from) {
  __builtin_assume(__isGlobal(from));
  return __ldcg(from);
}

__device__ __forceinline__ void store_word(uint32_t* to, uint32_t value) {
  __builtin_assume(__isGlobal(to));
  *to = value;
}

// A word of the caller's.
__device__ __forceinline__ uint32_t load_plain(uint64_t address) {
  uint32_t value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_plain(uint64_t address, uint32_t value) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_plain(uint64_t address, uint16_t value) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(value) : "memory");
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

// What was done before the release of the value it sees is visible after it.
__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_relaxed_sys(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint16_t load_relaxed_sys(const uint16_t* from) {
  uint16_t value;
  asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_sys(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// A packet: one access of 16 bytes, which the memory model makes single-copy atomic (PTX ISA 8.4, b128 at system scope).
// So the epoch in its last word says that the payload beside it has come, with no fence.
__device__ __forceinline__ Pack load_packet_relaxed_sys(const Pack* from) {
  uint64_t low, high;
  asm volatile(
      "{ .reg .b128 packet; ld.relaxed.sys.global.b128 packet, [%2]; mov.b128 {%0, %1}, packet; }"
      : "=l"(low), "=l"(high)
      : "l"(from)
      : "memory");
  return Pack{{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
               static_cast<uint32_t>(high >> 32)}};
}

__device__ __forceinline__ void store_packet_relaxed_sys(Pack* to, const Pack& packet) {
  const uint64_t low = static_cast<uint64_t>(packet.words[1]) << 32 | packet.words[0];
  const uint64_t high = static_cast<uint64_t>(packet.words[3]) << 32 | packet.words[2];
  asm volatile("{ .reg .b128 packet; mov.b128 packet, {%1, %2}; st.relaxed.sys.global.b128 [%0], packet; }" ::"l"(to),
               "l"(low), "l"(high)
               : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// Orders everything this thread, and by a preceding block barrier this block, has done before it.
__device__ __forceinline__ void store_release_sys(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ void store_release_sys(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Orders all that this thread did before it, and all that it does after it.
__device__ __forceinline__ void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Has these addresses, or other even numbers, computed by now. The compiler would compute what a wait doesn't need behind the
// wait, where it is used; so a branch, which is never taken, needs them here.
template <typename... Even>
__device__ __forceinline__ void have(const Even&... numbers) {
  const uint32_t bits = (... | (static_cast<uint32_t>(numbers) | static_cast<uint32_t>(static_cast<uint64_t>(numbers) >> 32) << 1));
  if (bits == ~0u) __trap();
}

// The same number, which the compiler can't compute again from what it came from.
__device__ __forceinline__ uint64_t keep(uint64_t number) {
  asm volatile("" : "+l"(number));
  return number;
}
__device__ __forceinline__ uint32_t keep(uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Programmatic dependent launch (compute capability 9.0 and later; before it kernels simply follow one another).
//
// Waits until the kernel before this one in the stream has finished and what it wrote is visible. Nothing of the caller's
// or of the segment's may be touched before.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream come and wait. Only after the wait above: else ever more kernels of one rank would
// come, and take the place that a peer's needs.
__device__ __forceinline__ void let_next_kernel_come() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Nanoseconds of a clock that all SMs of a device share.
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

}  // namespace peersum
