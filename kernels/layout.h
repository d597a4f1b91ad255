/* What the kernels and the host side share: constants, structures and the split of a message.
 *
 * This file is plain C. The kernels include it, bindgen turns it into src/protocol/bindings.rs (`cargo xtask bindings`),
 * and tests/layout-probe compiles it with the C compiler to compare sizes, offsets and the split functions with Rust's.
 *
 * One segment of symmetric memory per rank, the same layout on every rank:
 *
 *   control   | struct peersum_control
 *   flags     | [2 parities][max_blocks][world] lines of 128 bytes; line (p, b, w) is written by rank w alone
 *   staging   | [2 parities][max_blocks][world] slots of slot_bytes
 *
 * A round of block b is one exchange: every rank fills slots of half (epoch & 1), then releases its flag of that half to
 * every peer, then acquires every peer's. One-shot takes one round a chunk, two-shot two, or by flags on the GPU one more
 * than there are chunks.
 *
 * On the GPU a segment holds two such regions, one behind the other: what LL packets were stored in must never hold
 * anything else, since a packet's own word says whether it has come. Each has its own epochs; the abort word and the
 * claim are those of the first. Behind them lies the heap of the caller's symmetric tensors, if one was asked for.
 */
#ifndef PEERSUM_LAYOUT_H
#define PEERSUM_LAYOUT_H

#include <stdint.h>

/* The most ranks that the CUDA kernels serve. The host backend's layout has no such bound. */
#define PEERSUM_MAX_RANKS 8
/* The most blocks (CTAs) of one call. */
#define PEERSUM_MAX_BLOCKS 64
/* The most threads of a block. */
#define PEERSUM_MAX_THREADS 512
/* Flags of different writers lie on lines of their own. */
#define PEERSUM_LINE_BYTES 128
/* The unit of every payload access. */
#define PEERSUM_PACK_BYTES 16
/* An LL packet is one pack: so many bytes of payload, then the epoch in the last four. */
#define PEERSUM_LL_PAYLOAD_BYTES 12
/* Segments start with this many bytes of control. */
#define PEERSUM_CONTROL_BYTES 4096

/* Element types. */
#define PEERSUM_F32 0
#define PEERSUM_F16 1
#define PEERSUM_BF16 2

/* Reductions. */
#define PEERSUM_SUM 0
#define PEERSUM_AVERAGE 1
#define PEERSUM_MAX 2
#define PEERSUM_MIN 3

/* Algorithms. */
#define PEERSUM_ONE_SHOT 0
#define PEERSUM_TWO_SHOT 1
#define PEERSUM_ONE_SHOT_PULL 2
#define PEERSUM_TWO_SHOT_PULL 3
#define PEERSUM_ONE_SHOT_LL 4
#define PEERSUM_TWO_SHOT_LL 5
#define PEERSUM_ONE_SHOT_DIRECT 6
#define PEERSUM_TWO_SHOT_DIRECT 7
#define PEERSUM_NCCL 8 /* a gate of the library's, then NCCL */

/* What a block was doing when it gave up. */
#define PEERSUM_PHASE_EXCHANGE 0       /* the only round of a one-shot chunk */
#define PEERSUM_PHASE_REDUCE_SCATTER 1 /* the first round of a two-shot chunk */
#define PEERSUM_PHASE_ALL_GATHER 2     /* the second round of a two-shot chunk */
#define PEERSUM_PHASE_ENTRY 3          /* the round before tensors are read where they are */
#define PEERSUM_PHASE_EXIT 4           /* the round after that */
#define PEERSUM_PHASE_GATE 5           /* the round before NCCL is called */

/* Why it gave up. */
#define PEERSUM_GAVE_UP_TIMEOUT 1  /* a peer's flag did not come before the deadline */
#define PEERSUM_GAVE_UP_MISMATCH 2 /* it came with the hash of another call */
#define PEERSUM_GAVE_UP_ABORTED 3  /* another rank, or the host, set the abort word */

/* The abort word is 0, or 1 + the rank that gave up, or this when the host asked. */
#define PEERSUM_ABORT_BY_HOST 0x80000000u

/* A flag word: the call's hash in the high half, the epoch in the low half. A hash is never 0, so a word of fresh
 * memory is no flag, whatever the epoch. */
#define PEERSUM_HASH_SHIFT 32

/* The head of every segment. */
struct peersum_control {
  /* Written by any rank that gives up, relaxed at system scope; read by the owner's kernels. */
  uint32_t abort;
  /* Which block of the owner writes the record: the first to change 0 to 1. */
  uint32_t claimed;
  /* On the host backend, the call that the owner is in or was in last; a rank that finds another call's flag reads the
   * peer's. On the GPU this goes into the record. */
  uint64_t host_call[4];
  uint32_t reserved[22];
  /* The owner's last finished epoch, by block. Nobody else reads it. */
  uint32_t epochs[PEERSUM_MAX_BLOCKS];
};

/* What a rank that gives up leaves for the hosts, in host memory that every device of the group maps. */
struct peersum_record {
  uint32_t abort_requested; /* 0, or why a host asked for an abort; the only field that hosts write */
  uint32_t state;           /* 0, or 1 once the rest is written */
  uint32_t reason;
  uint32_t rank;
  uint32_t peer;
  uint32_t block;
  uint32_t phase;
  uint32_t epoch;
  uint32_t abort; /* the abort word, if that is the reason */
  uint32_t dtype; /* from here on to output, the call that it gave up */
  uint32_t op;
  uint32_t algorithm;
  uint32_t blocks;
  uint32_t threads;
  uint64_t count;
  uint64_t chunk_units;
  uint64_t input; /* where they lie, from the start of the rank's segment, if they lie there */
  uint64_t output;
  uint64_t expected; /* flag words */
  uint64_t observed;
  uint64_t waited_ns;
};

/* One all-reduce, as the kernel gets it. */
struct peersum_call {
  uint64_t segments[PEERSUM_MAX_RANKS]; /* every rank's segment, as this rank's device maps it */
  uint64_t input;
  uint64_t output;
  uint64_t count;       /* elements */
  uint64_t packet_region; /* where in each segment the region of LL packets starts; that of flags starts at 0 */
  uint64_t slot_bytes;  /* a multiple of PEERSUM_LINE_BYTES */
  uint64_t block_units; /* units of each block; the first `longer_blocks` have one more (peersum_split_start). A unit is
                           a pack, for LL the payload of a packet */
  uint64_t chunk_units; /* units of a chunk: what a block moves in one round (one-shot) or two (two-shot). Of packets they
                           fill the slots, or in the last chunk less */
  uint64_t timeout_ns;
  uint64_t record; /* struct peersum_record* of this rank */
  uint32_t rank;
  uint32_t world;
  uint32_t max_blocks;
  uint32_t op;
  uint32_t hash;
  uint32_t vector_input;  /* 1 if input is 16-byte aligned */
  uint32_t vector_output; /* 1 if output is 16-byte aligned */
  uint32_t longer_blocks;
  uint32_t early; /* 1 if the next kernel of the stream may come as soon as this one has begun */
  uint16_t dtype; /* this and the algorithm are for the record alone */
  uint16_t algorithm;
};

#ifdef __CUDACC__
#define PEERSUM_SHARED static __host__ __device__ __forceinline__
#else
#define PEERSUM_SHARED static inline
#endif

/* `total` units over `parts` parts, as even as can be, the longer parts first: where part `index` starts.
 * The end of a part is the start of the next; split_start(total, parts, parts) == total. */
PEERSUM_SHARED uint64_t peersum_split_start(uint64_t total, uint64_t parts, uint64_t index) {
  uint64_t base = total / parts, longer = total % parts;
  return base * index + (index < longer ? index : longer);
}

/* Byte offset of the flag line of (parity, block, writer) in a segment. */
PEERSUM_SHARED uint64_t peersum_flag_offset(uint32_t world, uint32_t max_blocks, uint32_t parity, uint32_t block,
                                            uint32_t writer) {
  return PEERSUM_CONTROL_BYTES +
         (((uint64_t)parity * max_blocks + block) * world + writer) * (uint64_t)PEERSUM_LINE_BYTES;
}

/* Byte offset of the slot of (parity, block, source) in a segment. */
PEERSUM_SHARED uint64_t peersum_slot_offset(uint32_t world, uint32_t max_blocks, uint64_t slot_bytes, uint32_t parity,
                                            uint32_t block, uint32_t source) {
  return peersum_flag_offset(world, max_blocks, 2, 0, 0) +
         (((uint64_t)parity * max_blocks + block) * world + source) * slot_bytes;
}

#endif
