/* Reading ZFile: every block is found through the jump table, checked and decompressed for itself. */
#include <errno.h>
#include <lz4.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "lsmt_scratch.h"
#include "lsmt_zfile.h"

#define GROUP 32             /* blocks whose offset is one number plus a sum of lengths */
#define READ_CHUNK (1u << 18) /* compressed bytes read at once, at most */

const uint8_t ZFILE_MAGIC[24] = {'Z', 'F', 'i', 'l', 'e', 0, 1, 0, 0x74, 0x75, 0x6A, 0x69,
                                 0x2E, 0x79, 0x79, 0x66, 0x40, 0x41, 0x6C, 0x69, 0x62, 0x61, 0x62, 0x61};

/* `lengths` has 2 bytes for each block (blocks up to 32 KiB) or 4: 100 GB in blocks of 4 KiB cost 55 MB. */
struct zfile {
    struct source source;
    struct source *inner;
    uint64_t serial, blocks, *group;
    void *lengths;
    uint32_t block_size;
    bool wide, verify;
    enum layer_form form;
};

uint32_t zfile_digest(const struct zfile_header *header)
{
    struct zfile_header copy = *header;
    copy.digest = 0;
    return crc32c_raw(0, &copy, sizeof copy);
}

static uint32_t stored_length(const struct zfile *zfile, uint64_t block)
{
    return zfile->wide ? ((const uint32_t *)zfile->lengths)[block] : ((const uint16_t *)zfile->lengths)[block];
}

static uint64_t stored_offset(const struct zfile *zfile, uint64_t block)
{
    uint64_t offset = zfile->group[block / GROUP];
    for (uint64_t i = block / GROUP * GROUP; i < block; i++)
        offset += stored_length(zfile, i);
    return offset;
}

static uint32_t plain_length(const struct zfile *zfile, uint64_t block)
{
    uint64_t left = zfile->source.size - block * zfile->block_size;
    return left < zfile->block_size ? (uint32_t)left : zfile->block_size;
}

static int unpack(const struct zfile *zfile, const uint8_t *packed, uint32_t length, uint64_t block, void *out)
{
    uint32_t want = plain_length(zfile, block);
    if (zfile->verify) {
        uint32_t stored;
        length -= 4;
        memcpy(&stored, packed + length, 4);
        if (crc32c_raw(ZFILE_BLOCK_SEED, packed, length) != stored)
            return -EBADMSG;
    }
    if (zfile->form == FORM_LZ4)
        return LZ4_decompress_safe((const char *)packed, out, (int)length, (int)want) == (int)want ? 0 : -EBADMSG;
    ZSTD_DCtx *context = scratch_zstd();
    if (!context)
        return -ENOMEM;
    return ZSTD_decompressDCtx(context, out, want, packed, length) == want ? 0 : -EBADMSG;
}

/* Copies the part of one block, which `packed` holds, that lies in [offset, offset + length). */
static int copy_block(struct zfile *zfile, const uint8_t *packed, uint64_t block, char *buffer, size_t length,
                      uint64_t offset)
{
    uint64_t begin = block * zfile->block_size, end = begin + plain_length(zfile, block);
    if (offset <= begin && offset + length >= end)
        return unpack(zfile, packed, stored_length(zfile, block), block, buffer + (begin - offset));
    struct scratch_block *held = scratch_block();
    char *plain = scratch_buffer(SCRATCH_BLOCK, zfile->block_size);
    if (!held || !plain)
        return -ENOMEM;
    if (held->serial != zfile->serial || held->block != block) {
        held->serial = 0;
        int rc = unpack(zfile, packed, stored_length(zfile, block), block, plain);
        if (rc)
            return rc;
        *held = (struct scratch_block){zfile->serial, block};
    }
    uint64_t from = offset > begin ? offset : begin, to = offset + length < end ? offset + length : end;
    memcpy(buffer + (from - offset), plain + (from - begin), to - from);
    return 0;
}

static bool copy_held_block(const struct zfile *zfile, uint64_t block, void *buffer, size_t length, uint64_t offset)
{
    const struct scratch_block *held = scratch_block();
    if (!held || held->serial != zfile->serial || held->block != block)
        return false;
    const char *plain = scratch_buffer(SCRATCH_BLOCK, zfile->block_size);
    memcpy(buffer, plain + (offset - block * zfile->block_size), length);
    return true;
}

static int zfile_read(struct source *source, void *buffer, size_t length, uint64_t offset, bool direct)
{
    struct zfile *zfile = (struct zfile *)source;
    if (offset > source->size || length > source->size - offset)
        return -ENODATA;
    if (!length)
        return 0;
    uint64_t block = offset / zfile->block_size, last = (offset + length - 1) / zfile->block_size;
    if (block == last && copy_held_block(zfile, block, buffer, length, offset))
        return 0;
    while (block <= last) {
        uint64_t at = stored_offset(zfile, block), stop = block;
        size_t bytes = 0;
        while (stop <= last && (stop == block || bytes + stored_length(zfile, stop) <= READ_CHUNK))
            bytes += stored_length(zfile, stop++);
        uint8_t *packed = scratch_buffer(SCRATCH_PACKED, bytes);
        if (!packed)
            return -ENOMEM;
        int rc = zfile->inner->read(zfile->inner, packed, bytes, at, direct);
        if (rc)
            return rc;
        for (; block < stop; packed += stored_length(zfile, block), block++)
            if ((rc = copy_block(zfile, packed, block, buffer, length, offset)))
                return rc;
    }
    return 0;
}

static void zfile_close(struct source *source)
{
    struct zfile *zfile = (struct zfile *)source;
    zfile->inner->close(zfile->inner);
    free(zfile->group);
    free(zfile->lengths);
    free(zfile);
}

#define REFUSE(field, ...) return fault_set(fault, EBADMSG, "zfile." field, __VA_ARGS__)

static int check_header(const struct zfile_header *h, bool trailer, struct fault *fault)
{
    if (memcmp(h->magic0, ZFILE_MAGIC, 8) != 0)
        REFUSE("magic0", "not a ZFile");
    if (memcmp(h->magic1, ZFILE_MAGIC + 8, 16) != 0)
        REFUSE("magic1", "not a ZFile");
    if (h->size != 96)
        REFUSE("size", "%u instead of 96", h->size);
    if (!(h->flags & ZFILE_IS_DATA) || !(h->flags & ZFILE_DIGEST) || (h->flags & ZFILE_INDEX_PACKED) ||
        h->flags >> 6 || !!(h->flags & ZFILE_IS_HEADER) == trailer || (trailer && !(h->flags & ZFILE_SEALED)) ||
        (h->flags & ZFILE_OVERWRITTEN && !(h->flags & ZFILE_IS_HEADER)))
        REFUSE("flags", "0x%llx makes no sense in a %s", (unsigned long long)h->flags, trailer ? "trailer" : "header");
    if (h->digest != zfile_digest(h))
        REFUSE("digest", "the checksum of the %s does not hold", trailer ? "trailer" : "header");
    if (h->block_size < 4096 || h->block_size > 65536 || h->block_size & (h->block_size - 1))
        REFUSE("block_size", "%u is not a power of two from 4096 to 65536", h->block_size);
    if (h->algo != FORM_LZ4 && h->algo != FORM_ZSTD)
        REFUSE("algo", "%u is neither lz4 (1) nor zstd (2)", h->algo);
    if (h->use_dict)
        REFUSE("use_dict", "dictionaries are not supported");
    if (h->dict_size)
        REFUSE("dict_size", "dictionaries are not supported");
    if (h->verify > 1)
        REFUSE("verify", "%u is neither 0 nor 1", h->verify);
    return 0;
}

static int load_final_header(struct source *inner, struct zfile_header *h, struct fault *fault)
{
    if (inner->size < 2 * ZFILE_HEADER)
        REFUSE("file", "too short");
    int rc = inner->read(inner, h, sizeof *h, 0, false);
    if (rc)
        return fault_set(fault, -rc, "zfile.header", "cannot be read");
    if ((rc = check_header(h, false, fault)) || h->flags & ZFILE_OVERWRITTEN)
        return rc;
    rc = inner->read(inner, h, sizeof *h, inner->size - ZFILE_HEADER, false);
    return rc ? fault_set(fault, -rc, "zfile.trailer", "cannot be read") : check_header(h, true, fault);
}

static int check_geometry(const struct zfile_header *h, uint64_t file_size, struct fault *fault)
{
    uint64_t blocks = h->original_file_size / h->block_size + !!(h->original_file_size % h->block_size);
    if (h->index_offset < ZFILE_HEADER || h->index_offset > file_size - ZFILE_HEADER)
        REFUSE("index_offset", "%llu is outside of the file", (unsigned long long)h->index_offset);
    if (h->index_size != blocks)
        REFUSE("index_size", "%llu blocks for %llu bytes", (unsigned long long)h->index_size,
               (unsigned long long)h->original_file_size);
    if (h->index_size > (file_size - ZFILE_HEADER - h->index_offset) / 4)
        REFUSE("index_size", "%llu blocks do not fit in the file", (unsigned long long)h->index_size);
    if (!blocks)
        REFUSE("original_file_size", "an empty file");
    return 0;
}

static int load_jump_table(struct zfile *zfile, const struct zfile_header *h, struct fault *fault)
{
    uint64_t at = ZFILE_HEADER, least = zfile->verify ? 5 : 1, most;
    uint32_t crc = 0, piece[1024];
    most = codec_bound(zfile->form, zfile->block_size) + 4;
    for (uint64_t i = 0; i < zfile->blocks; i++) {
        if (i % 1024 == 0) {
            size_t bytes = 4 * (zfile->blocks - i < 1024 ? zfile->blocks - i : 1024);
            int rc = zfile->inner->read(zfile->inner, piece, bytes, h->index_offset + 4 * i, false);
            if (rc)
                return fault_set(fault, -rc, "zfile.index", "cannot be read");
            crc = crc32c_raw(crc, piece, bytes);
        }
        uint32_t length = piece[i % 1024];
        if (i % GROUP == 0)
            zfile->group[i / GROUP] = at;
        if (length < least || length > most)
            REFUSE("index.length", "block %llu has %u bytes", (unsigned long long)i, length);
        if (zfile->wide)
            ((uint32_t *)zfile->lengths)[i] = length;
        else
            ((uint16_t *)zfile->lengths)[i] = (uint16_t)length;
        at += length;
    }
    if (crc != h->index_crc)
        REFUSE("index_crc", "the checksum of the jump table does not hold");
    if (at > h->index_offset)
        REFUSE("index.length", "the blocks overlap the jump table");
    return 0;
}

int source_zfile(struct source *inner, struct source **out, struct fault *fault)
{
    static atomic_ulong serial;
    struct zfile_header h;
    int rc = load_final_header(inner, &h, fault);
    if (rc || (rc = check_geometry(&h, inner->size, fault)))
        return rc;
    struct zfile *zfile = calloc(1, sizeof *zfile);
    if (!zfile)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    zfile->source = (struct source){zfile_read, zfile_close, h.original_file_size, inner->remote};
    zfile->serial = atomic_fetch_add(&serial, 1) + 1;
    zfile->blocks = h.index_size;
    zfile->block_size = h.block_size;
    zfile->form = h.algo == FORM_LZ4 ? FORM_LZ4 : FORM_ZSTD;
    zfile->verify = h.verify;
    zfile->wide = codec_bound(zfile->form, h.block_size) + 4 > UINT16_MAX;
    zfile->group = malloc((h.index_size / GROUP + 1) * sizeof *zfile->group);
    zfile->lengths = malloc(h.index_size * (zfile->wide ? 4 : 2));
    zfile->inner = inner;
    if (!zfile->group || !zfile->lengths)
        rc = fault_set(fault, ENOMEM, "memory", "out of memory");
    if (rc || (rc = load_jump_table(zfile, &h, fault))) {
        free(zfile->group), free(zfile->lengths), free(zfile);
        return rc;
    }
    *out = &zfile->source;
    return 0;
}

int zfile_verify(struct source *source, progress_t progress, void *opaque, struct fault *fault)
{
    char piece[1 << 16];
    for (uint64_t at = 0; at < source->size;) {
        size_t bytes = source->size - at < sizeof piece ? source->size - at : sizeof piece;
        int rc = source->read(source, piece, bytes, at, false);
        if (rc == -EBADMSG)
            return fault_set(fault, EBADMSG, "zfile.block.crc", "a block near byte %llu is damaged",
                             (unsigned long long)at);
        if (rc)
            return fault_set(fault, -rc, "data", "cannot be read at byte %llu", (unsigned long long)at);
        at += bytes;
        if (progress && !progress(opaque, at))
            return fault_set(fault, ECANCELED, "progress", "stopped");
    }
    return 0;
}

/* --- codecs -------------------------------------------------------------------------------------------------- */

struct codec {
    enum layer_form form;
    ZSTD_CCtx *zstd;
};

struct codec *codec_new(enum layer_form form)
{
    struct codec *codec = calloc(1, sizeof *codec);
    if (codec && form == FORM_ZSTD && !(codec->zstd = ZSTD_createCCtx())) {
        free(codec);
        return NULL;
    }
    if (codec)
        codec->form = form;
    return codec;
}

void codec_free(struct codec *codec)
{
    if (codec)
        ZSTD_freeCCtx(codec->zstd);
    free(codec);
}

size_t codec_bound(enum layer_form form, size_t length)
{
    return form == FORM_LZ4 ? (size_t)LZ4_compressBound((int)length) : ZSTD_compressBound(length);
}

long codec_compress(struct codec *codec, const void *in, size_t length, void *out, size_t room)
{
    if (codec->form == FORM_LZ4) {
        int size = LZ4_compress_default(in, out, (int)length, (int)room);
        return size > 0 ? size : -EINVAL;
    }
    size_t size = ZSTD_compressCCtx(codec->zstd, out, room, in, length, 3);
    return ZSTD_isError(size) ? -EINVAL : (long)size;
}
