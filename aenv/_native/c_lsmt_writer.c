/* Writing sealed layers in one pass: LSMT, inside ZFile if asked for, inside tar if asked for. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lsmt_format.h"
#include "lsmt_zfile.h"

#define BUFFER (1u << 20)
#define TAR_HEAD 1536u

/* Bytes go through `plain` (cut into blocks for a ZFile) to `packed`, which is written to the file when full. */
struct writer {
    int fd;
    struct writer_options options;
    char uuid[LSMT_UUID], parent_uuid[LSMT_UUID], user_tag[LSMT_TAG + 1];
    uint64_t base, file_at; /* where the payload starts, and where `packed` goes */
    uint8_t *packed, *plain;
    size_t packed_used, plain_used;
    struct codec *codec;
    uint32_t *jumps;
    uint64_t blocks, blocks_room;
    uint64_t lsmt_at; /* bytes of LSMT written */
    struct segment *entries;
    size_t count, room;
    uint64_t done; /* sectors of the image */
};

static int flush_packed(struct writer *writer)
{
    int rc = write_fully(writer->fd, writer->packed, writer->packed_used, writer->file_at);
    if (!rc) {
        writer->file_at += writer->packed_used;
        writer->packed_used = 0;
    }
    return rc;
}

static int put_packed(struct writer *writer, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    while (length) {
        size_t room = BUFFER - writer->packed_used, part = length < room ? length : room;
        memcpy(writer->packed + writer->packed_used, bytes, part);
        writer->packed_used += part, bytes += part, length -= part;
        int rc = writer->packed_used == BUFFER ? flush_packed(writer) : 0;
        if (rc)
            return rc;
    }
    return 0;
}

static int add_jump(struct writer *writer, uint32_t length)
{
    if (writer->blocks == writer->blocks_room) {
        uint64_t room = writer->blocks_room ? writer->blocks_room * 2 : 1024;
        uint32_t *jumps = realloc(writer->jumps, room * sizeof *jumps);
        if (!jumps)
            return -ENOMEM;
        writer->jumps = jumps;
        writer->blocks_room = room;
    }
    writer->jumps[writer->blocks++] = length;
    return 0;
}

static int pack_block(struct writer *writer)
{
    uint8_t out[65536 + 65536 / 128 + 256];
    long size = codec_compress(writer->codec, writer->plain, writer->plain_used, out, sizeof out - 4);
    if (size < 0)
        return (int)size;
    uint32_t crc = crc32c_raw(ZFILE_BLOCK_SEED, out, (size_t)size);
    memcpy(out + size, &crc, 4);
    writer->plain_used = 0;
    int rc = add_jump(writer, (uint32_t)size + 4);
    return rc ? rc : put_packed(writer, out, (size_t)size + 4);
}

static int put_plain(struct writer *writer, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    writer->lsmt_at += length;
    if (writer->options.form == FORM_PLAIN)
        return put_packed(writer, data, length);
    while (length) {
        size_t room = writer->options.block_size - writer->plain_used, part = length < room ? length : room;
        memcpy(writer->plain + writer->plain_used, bytes, part);
        writer->plain_used += part, bytes += part, length -= part;
        int rc = writer->plain_used == writer->options.block_size ? pack_block(writer) : 0;
        if (rc)
            return rc;
    }
    return 0;
}

static int put_lsmt_block(struct writer *writer, uint32_t flags, uint64_t index_offset, uint64_t index_size)
{
    struct lsmt_header header;
    header_fill(&header, flags, writer->options.virtual_size, writer->uuid, writer->parent_uuid, writer->user_tag);
    header.index_offset = index_offset;
    header.index_size = index_size;
    return put_plain(writer, &header, sizeof header);
}

static int check_options(const struct writer_options *o, struct fault *fault)
{
    if (o->form != FORM_PLAIN && o->form != FORM_LZ4 && o->form != FORM_ZSTD)
        return fault_set(fault, EINVAL, "form", "neither plain, lz4 nor zstd");
    if (o->form != FORM_PLAIN &&
        (o->block_size < 4096 || o->block_size > 65536 || o->block_size & (o->block_size - 1)))
        return fault_set(fault, EINVAL, "block_size", "%u is not a power of two from 4096 to 65536", o->block_size);
    if (o->virtual_size % LSMT_SECTOR || o->virtual_size / LSMT_SECTOR > LSMT_MAX_SECTORS)
        return fault_set(fault, EINVAL, "virtual_size", "%llu bytes", (unsigned long long)o->virtual_size);
    return text_check(o->uuid, o->parent_uuid, o->user_tag, fault);
}

int writer_new(int fd, const struct writer_options *options, struct writer **out, struct fault *fault)
{
    int rc = check_options(options, fault);
    if (rc)
        return rc;
    struct writer *writer = calloc(1, sizeof *writer);
    if (!writer)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    writer->fd = fd;
    writer->options = *options;
    snprintf(writer->uuid, sizeof writer->uuid, "%s", options->uuid ? options->uuid : "");
    snprintf(writer->parent_uuid, sizeof writer->parent_uuid, "%s", options->parent_uuid ? options->parent_uuid : "");
    snprintf(writer->user_tag, sizeof writer->user_tag, "%s", options->user_tag ? options->user_tag : "");
    writer->base = options->tar ? TAR_HEAD : 0;
    writer->file_at = writer->base + (options->form == FORM_PLAIN ? 0 : ZFILE_HEADER);
    writer->packed = malloc(BUFFER);
    if (options->form != FORM_PLAIN) {
        writer->plain = malloc(options->block_size);
        writer->codec = codec_new(options->form);
    }
    if (!writer->packed || (options->form != FORM_PLAIN && (!writer->plain || !writer->codec))) {
        writer_free(writer);
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    }
    if ((rc = put_lsmt_block(writer, LSMT_IS_HEADER | LSMT_IS_DATA | LSMT_SEALED, 0, 0))) {
        writer_free(writer);
        return fault_set(fault, -rc, "file", "cannot be written: %s", strerror(-rc));
    }
    *out = writer;
    return 0;
}

void writer_free(struct writer *writer)
{
    if (!writer)
        return;
    codec_free(writer->codec);
    free(writer->packed), free(writer->plain), free(writer->jumps), free(writer->entries);
    free(writer);
}

static int add_entry(struct writer *writer, struct segment entry)
{
    if (writer->count && seg_join(&writer->entries[writer->count - 1], &entry))
        return 0;
    if (writer->count == writer->room) {
        size_t room = writer->room ? writer->room * 2 : 256;
        struct segment *entries = realloc(writer->entries, room * sizeof *entries);
        if (!entries)
            return -ENOMEM;
        writer->entries = entries;
        writer->room = room;
    }
    writer->entries[writer->count++] = entry;
    return 0;
}

int writer_add(struct writer *writer, uint64_t sector, uint64_t sectors, const void *data, struct fault *fault)
{
    const uint8_t *bytes = data;
    if (sector < writer->done)
        return fault_set(fault, EINVAL, "sector", "segments must be added in ascending order");
    if (sectors > LSMT_MAX_SECTORS || sector + sectors > writer->options.virtual_size / LSMT_SECTOR)
        return fault_set(fault, EINVAL, "sectors", "the segment ends after the image");
    int rc = data ? put_plain(writer, data, sectors * LSMT_SECTOR) : 0;
    uint64_t moffset = (writer->lsmt_at - (bytes ? sectors * LSMT_SECTOR : 0)) / LSMT_SECTOR;
    writer->done = sector + sectors;
    while (!rc && sectors) {
        uint64_t part = sectors < LSMT_MAX_LENGTH ? sectors : LSMT_MAX_LENGTH;
        rc = add_entry(writer, seg_make(sector, part, moffset, !data, 0));
        sector += part, sectors -= part, moffset += data ? part : 0;
    }
    return rc ? fault_set(fault, -rc, "file", "cannot be written: %s", strerror(-rc)) : 0;
}

uint64_t writer_entries(const struct writer *writer) { return writer->count; }

static int put_index(struct writer *writer)
{
    uint64_t index_offset = writer->lsmt_at, padded = (writer->count + 255) / 256 * 256;
    const struct segment padding = seg_make(LSMT_NO_OFFSET, 0, 0, false, 0);
    int rc = put_plain(writer, writer->entries, writer->count * sizeof *writer->entries);
    for (uint64_t i = writer->count; !rc && i < padded; i++)
        rc = put_plain(writer, &padding, sizeof padding);
    return rc ? rc : put_lsmt_block(writer, LSMT_IS_DATA | LSMT_SEALED, index_offset, padded);
}

static int finish_zfile(struct writer *writer)
{
    uint64_t plain_size = writer->lsmt_at;
    int rc = writer->plain_used ? pack_block(writer) : 0;
    struct zfile_header header = {
        .size = 96,
        .index_offset = writer->file_at + writer->packed_used - writer->base,
        .index_size = writer->blocks,
        .original_file_size = plain_size,
        .index_crc = crc32c_raw(0, writer->jumps, writer->blocks * 4),
        .block_size = writer->options.block_size,
        .algo = (uint8_t)writer->options.form,
        .verify = 1,
    };
    memcpy(header.magic0, ZFILE_MAGIC, 8);
    memcpy(header.magic1, ZFILE_MAGIC + 8, 16);
    header.flags = ZFILE_IS_DATA | ZFILE_SEALED | ZFILE_DIGEST;
    header.digest = zfile_digest(&header);
    if (rc || (rc = put_packed(writer, writer->jumps, writer->blocks * 4)) ||
        (rc = put_packed(writer, &header, sizeof header)))
        return rc;
    header.flags = ZFILE_IS_HEADER | ZFILE_IS_DATA | ZFILE_OVERWRITTEN | ZFILE_DIGEST;
    header.digest = zfile_digest(&header);
    return write_fully(writer->fd, &header, sizeof header, writer->base);
}

/* --- tar ----------------------------------------------------------------------------------------------------- */

static void tar_header(uint8_t block[512], const char *name, char type, uint64_t size, unsigned mode)
{
    unsigned sum = 0;
    char *text = (char *)block;
    memset(block, 0, 512);
    snprintf(text, 100, "%s", name);
    snprintf(text + 100, 8, "%07o", mode);
    snprintf(text + 108, 8, "%07o", 0);
    snprintf(text + 116, 8, "%07o", 0);
    snprintf(text + 124, 12, "%011llo", (unsigned long long)size);
    snprintf(text + 136, 12, "%011o", 0);
    memset(text + 148, ' ', 8);
    text[156] = type;
    memcpy(text + 257, "ustar\0" "00", 8);
    snprintf(text + 265, 32, "root");
    snprintf(text + 297, 32, "root");
    for (int i = 0; i < 512; i++)
        sum += block[i];
    snprintf(text + 148, 8, "%06o", sum);
}

static int write_tar(struct writer *writer, uint64_t size)
{
    uint8_t head[TAR_HEAD] = {0}, zeros[1536] = {0};
    char record[48];
    /* The record's length counts its own digits. */
    int length = snprintf(record, sizeof record, " size=%llu\n", (unsigned long long)size) + 2;
    snprintf(record, sizeof record, "%d size=%llu\n", length, (unsigned long long)size);
    tar_header(head, "overlaybd.pax", 'x', (uint64_t)length, 0644);
    memcpy(head + 512, record, (size_t)length);
    tar_header(head + 1024, "overlaybd.commit", '0', 0, 0644);
    int rc = write_fully(writer->fd, head, sizeof head, 0);
    uint64_t padding = (512 - size % 512) % 512 + 1024;
    return rc ? rc : write_fully(writer->fd, zeros, padding, writer->base + size);
}

int writer_finish(struct writer *writer, uint64_t *file_size, struct fault *fault)
{
    int rc = put_index(writer);
    if (!rc && writer->options.form != FORM_PLAIN)
        rc = finish_zfile(writer);
    if (!rc)
        rc = flush_packed(writer);
    uint64_t payload = writer->file_at - writer->base;
    if (!rc && writer->options.tar)
        rc = write_tar(writer, payload);
    if (!rc && fdatasync(writer->fd))
        rc = -errno;
    *file_size = writer->options.tar ? writer->base + (payload + 511) / 512 * 512 + 1024 : payload;
    return rc ? fault_set(fault, -rc, "file", "cannot be written: %s", strerror(-rc)) : 0;
}
