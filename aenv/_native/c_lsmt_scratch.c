#include <pthread.h>
#include <stdlib.h>
#include <zstd.h>

#include "lsmt_scratch.h"

/* The I/O threads belong to front ends with no hook at their end: a thread-specific key frees the buffers. */
struct scratch {
    void *buffer[SCRATCH_KINDS];
    size_t length[SCRATCH_KINDS];
    struct scratch_block block;
    ZSTD_DCtx *zstd;
};

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void scratch_free(void *opaque)
{
    struct scratch *scratch = opaque;
    for (int i = 0; i < SCRATCH_KINDS; i++)
        free(scratch->buffer[i]);
    ZSTD_freeDCtx(scratch->zstd);
    free(scratch);
}

static void make_key(void) { pthread_key_create(&key, scratch_free); }

static struct scratch *of_this_thread(void)
{
    pthread_once(&once, make_key);
    struct scratch *scratch = pthread_getspecific(key);
    if (!scratch && (scratch = calloc(1, sizeof *scratch)) && pthread_setspecific(key, scratch)) {
        free(scratch);
        scratch = NULL;
    }
    return scratch;
}

void *scratch_buffer(enum scratch_kind kind, size_t length)
{
    struct scratch *scratch = of_this_thread();
    if (!scratch)
        return NULL;
    if (scratch->length[kind] >= length)
        return scratch->buffer[kind];
    void *buffer;
    if (posix_memalign(&buffer, 4096, length))
        return NULL;
    free(scratch->buffer[kind]);
    scratch->buffer[kind] = buffer;
    scratch->length[kind] = length;
    if (kind == SCRATCH_BLOCK)
        scratch->block.serial = 0;
    return buffer;
}

struct scratch_block *scratch_block(void)
{
    struct scratch *scratch = of_this_thread();
    return scratch ? &scratch->block : NULL;
}

void *scratch_zstd(void)
{
    struct scratch *scratch = of_this_thread();
    if (scratch && !scratch->zstd)
        scratch->zstd = ZSTD_createDCtx();
    return scratch ? scratch->zstd : NULL;
}
