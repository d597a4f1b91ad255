/* What a C compiler makes of kernels/layout.h: a table of numbers, and the inline functions as real ones. build.rs lists
 * what is to be in the table. */
#include <stddef.h>

#include "../../kernels/layout.h"

struct number {
  const char *name;
  uint64_t value;
};

static const struct number numbers[] = {
#include "numbers.inc"
};

/* The entry at `index`; a null name past the last. */
struct number layout_probe_number(size_t index) {
  struct number none = {0, 0};
  return index < sizeof numbers / sizeof *numbers ? numbers[index] : none;
}

uint64_t layout_probe_split_start(uint64_t total, uint64_t parts, uint64_t index) {
  return peersum_split_start(total, parts, index);
}

uint64_t layout_probe_flag_offset(uint32_t world, uint32_t max_blocks, uint32_t parity, uint32_t block,
                                  uint32_t writer) {
  return peersum_flag_offset(world, max_blocks, parity, block, writer);
}

uint64_t layout_probe_slot_offset(uint32_t world, uint32_t max_blocks, uint64_t slot_bytes, uint32_t parity,
                                  uint32_t block, uint32_t source) {
  return peersum_slot_offset(world, max_blocks, slot_bytes, parity, block, source);
}
