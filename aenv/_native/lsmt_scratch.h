/* Buffers of the calling thread, kept between reads: bounce buffers for O_DIRECT, compressed and decompressed blocks. */
#ifndef AENV_LSMT_SCRATCH_H
#define AENV_LSMT_SCRATCH_H

#include <stddef.h>
#include <stdint.h>

enum scratch_kind { SCRATCH_DIRECT, SCRATCH_PACKED, SCRATCH_BLOCK, SCRATCH_KINDS };

/* At least `length` bytes, aligned to 4096; valid until the thread's next call for the same kind. NULL: no memory. */
void *scratch_buffer(enum scratch_kind kind, size_t length);

/* Which decompressed block SCRATCH_BLOCK holds: a ZFile's serial number (0: none) and the block's number. */
struct scratch_block {
    uint64_t serial, block;
};
struct scratch_block *scratch_block(void);

/* The thread's ZSTD_DCtx: making one costs 150 KB of memory, too much for each block. */
void *scratch_zstd(void);

#endif
