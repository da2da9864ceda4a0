/* Opening sealed layers: every field is checked before it is used. */
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lsmt_format.h"
#include "lsmt_index.h"

static const uint8_t MAGIC[24] = {'L', 'S', 'M', 'T', 0, 1, 2, 0, 0x65, 0x7E, 0x63, 0xD2,
                                  0x94, 0x44, 0x08, 0x4C, 0xA2, 0xD2, 0xC8, 0xEC, 0x4F, 0xCF, 0xAE, 0x8A};
static const char *const ROLES[] = {"header", "trailer", "index.header"};

void header_fill(struct lsmt_header *header, uint32_t flags, uint64_t virtual_size, const char *uuid,
                 const char *parent_uuid, const char *user_tag)
{
    memset(header, 0, sizeof *header);
    memcpy(header->magic0, MAGIC, 8);
    memcpy(header->magic1, MAGIC + 8, 16);
    header->size = 390;
    header->flags = flags;
    header->virtual_size = virtual_size;
    if (uuid)
        memcpy(header->uuid, uuid, strnlen(uuid, LSMT_UUID - 1));
    if (parent_uuid)
        memcpy(header->parent_uuid, parent_uuid, strnlen(parent_uuid, LSMT_UUID - 1));
    if (user_tag)
        memcpy(header->user_tag, user_tag, strnlen(user_tag, LSMT_TAG));
    header->version = header->sub_version = 1;
}

/* Text and zeros up to the end of the field; `uuid` allows only its characters and a NUL at the end. */
static bool field_text_ok(const char *text, size_t room, bool uuid)
{
    size_t length = strnlen(text, room);
    if (uuid && (length == room || (length != 0 && length != LSMT_UUID - 1)))
        return false;
    for (size_t i = 0; uuid && i < length; i++)
        if (i == 8 || i == 13 || i == 18 || i == 23 ? text[i] != '-' : !isxdigit((unsigned char)text[i]))
            return false;
    return length == room || bytes_are_zero(text + length, room - length);
}

int text_check(const char *uuid, const char *parent_uuid, const char *user_tag, struct fault *fault)
{
    char field[LSMT_UUID];
    const char *texts[] = {uuid, parent_uuid};
    for (int i = 0; i < 2; i++) {
        if (!texts[i])
            continue;
        memset(field, 0, sizeof field);
        memcpy(field, texts[i], strnlen(texts[i], sizeof field));
        if (!field_text_ok(field, sizeof field, true))
            return fault_set(fault, EINVAL, i ? "parent_uuid" : "uuid", "not a UUID");
    }
    if (user_tag && strlen(user_tag) > LSMT_TAG)
        return fault_set(fault, EINVAL, "user_tag", "longer than %u bytes", LSMT_TAG);
    return 0;
}

#define REFUSE(name, ...) \
    do { \
        char where[48] = ""; \
        strcat(strcat(where, ROLES[role]), "." name); \
        return fault_set(fault, EBADMSG, where, __VA_ARGS__); \
    } while (0)

static bool flags_fit(uint32_t flags, enum lsmt_role role)
{
    const uint32_t known = LSMT_IS_HEADER | LSMT_IS_DATA | LSMT_SEALED | LSMT_GC | LSMT_SPARSE | LSMT_INFO_VALID;
    if (flags & ~known)
        return false;
    if (role == ROLE_HEADER)
        return flags & LSMT_IS_HEADER && flags & LSMT_IS_DATA;
    if (role == ROLE_TRAILER)
        return !(flags & LSMT_IS_HEADER) && flags & LSMT_IS_DATA && flags & LSMT_SEALED && !(flags & LSMT_SPARSE);
    return flags == LSMT_IS_HEADER;
}

int header_check(const struct lsmt_header *header, enum lsmt_role role, struct fault *fault)
{
    if (memcmp(header->magic0, MAGIC, 8) != 0)
        REFUSE("magic0", "not an LSMT file");
    if (memcmp(header->magic1, MAGIC + 8, 16) != 0)
        REFUSE("magic1", "not an LSMT file");
    if (header->size != 390)
        REFUSE("size", "%u instead of 390", header->size);
    if (!flags_fit(header->flags, role))
        REFUSE("flags", "0x%x makes no sense here", header->flags);
    if (header->virtual_size % LSMT_SECTOR || header->virtual_size / LSMT_SECTOR > LSMT_MAX_SECTORS)
        REFUSE("virtual_size", "%llu bytes", (unsigned long long)header->virtual_size);
    if (!field_text_ok(header->uuid, LSMT_UUID, true))
        REFUSE("uuid", "not a UUID");
    if (!field_text_ok(header->parent_uuid, LSMT_UUID, true))
        REFUSE("parent_uuid", "not a UUID");
    if (header->reserved)
        REFUSE("reserved", "%u instead of 0", header->reserved);
    if (header->version != 1)
        REFUSE("version", "%u instead of 1", header->version);
    if (header->sub_version > 1)
        REFUSE("sub_version", "%u is newer than 1", header->sub_version);
    if (!field_text_ok(header->user_tag, LSMT_TAG, false))
        REFUSE("user_tag", "bytes after its end");
    if (!bytes_are_zero(header->pad, sizeof header->pad))
        REFUSE("padding", "not zero");
    return 0;
}

void header_info(const struct lsmt_header *header, struct layer_info *info)
{
    info->virtual_size = header->virtual_size;
    memcpy(info->uuid, header->uuid, LSMT_UUID);
    memcpy(info->parent_uuid, header->parent_uuid, LSMT_UUID);
    memcpy(info->user_tag, header->user_tag, LSMT_TAG);
    info->user_tag[LSMT_TAG] = 0;
}

int entries_check(struct segment *entries, size_t *count, uint64_t index_offset, struct fault *fault)
{
    const uint64_t first = LSMT_BLOCK / LSMT_SECTOR, limit = index_offset / LSMT_SECTOR;
    size_t kept = 0;
    uint64_t done = 0;
    for (size_t i = 0; i < *count; i++) {
        struct segment s = entries[i];
        unsigned long long number = i, moffset = seg_moffset(&s);
        if (seg_offset(&s) == LSMT_NO_OFFSET)
            continue;
        if (!seg_length(&s))
            return fault_set(fault, EBADMSG, "index.length", "entry %llu has no length", number);
        if (seg_end(&s) > LSMT_MAX_SECTORS)
            return fault_set(fault, EBADMSG, "index.offset", "entry %llu ends after the largest image", number);
        if (seg_offset(&s) < done)
            return fault_set(fault, EBADMSG, "index.offset", "entry %llu overlaps or precedes the one before", number);
        if (moffset < first || moffset + (seg_zeroed(&s) ? 0 : seg_length(&s)) > limit)
            return fault_set(fault, EBADMSG, "index.moffset", "entry %llu points outside of the data (sector %llu)",
                             number, moffset);
        done = seg_end(&s);
        s.word1 &= (1ull << 56) - 1; /* the tag has a meaning only in memory */
        if (!kept || !seg_join(&entries[kept - 1], &s))
            entries[kept++] = s;
    }
    *count = kept;
    return 0;
}

struct layer *layer_new(struct source *source, const struct layer_info *info)
{
    struct layer *layer = calloc(1, sizeof *layer);
    if (!layer)
        return NULL;
    atomic_init(&layer->refs, 1);
    layer->source = source;
    layer->info = *info;
    return layer;
}

struct layer *layer_ref(struct layer *layer)
{
    atomic_fetch_add(&layer->refs, 1);
    return layer;
}

void layer_unref(struct layer *layer)
{
    if (!layer || atomic_fetch_sub(&layer->refs, 1) != 1)
        return;
    layer->source->close(layer->source);
    free(layer);
}

static int read_block(struct source *source, struct lsmt_header *header, enum lsmt_role role, struct fault *fault)
{
    uint64_t at = role == ROLE_TRAILER ? source->size - LSMT_BLOCK : 0;
    int rc = source->read(source, header, sizeof *header, at, false);
    return rc ? fault_set(fault, -rc, ROLES[role], "cannot be read") : header_check(header, role, fault);
}

static struct index *index_of(const struct segment *entries, size_t count)
{
    struct index_builder *builder = index_begin();
    for (size_t i = 0; builder && i < count; i++)
        index_put(builder, entries[i]);
    return index_end(builder);
}

/* A layer sealed in place (its header does not say so) may have as many entries as a writable one: it never leaves the
 * node as it is, a commit does. */
static int load_entries(struct source *source, const struct lsmt_header *trailer, bool committed, struct index **out,
                        struct fault *fault)
{
    uint64_t room = source->size - LSMT_BLOCK, most = committed ? LSMT_MAX_ENTRIES : LSMT_MAX_RW_ENTRIES;
    size_t count = trailer->index_size;
    if (trailer->index_offset < LSMT_BLOCK || trailer->index_offset > room || trailer->index_offset % LSMT_SECTOR)
        return fault_set(fault, EBADMSG, "trailer.index_offset", "%llu is outside of the file or unaligned",
                         (unsigned long long)trailer->index_offset);
    if (trailer->index_size > most || trailer->index_size > (room - trailer->index_offset) / 16)
        return fault_set(fault, EBADMSG, "trailer.index_size", "%llu entries are too many or do not fit in the file",
                         (unsigned long long)trailer->index_size);
    struct segment *entries = malloc((count + 1) * sizeof *entries);
    if (!entries)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    int rc = source->read(source, entries, count * sizeof *entries, trailer->index_offset, false);
    if (rc)
        fault_set(fault, -rc, rc == -EBADMSG ? "zfile.block.crc" : "index", "cannot be read");
    else
        rc = entries_check(entries, &count, trailer->index_offset, fault);
    *out = rc ? NULL : index_of(entries, count);
    free(entries);
    if (rc)
        return rc;
    return *out ? 0 : fault_set(fault, ENOMEM, "memory", "out of memory");
}

/* Takes over `source`. */
static int load_layer(struct source *source, struct layer_info *info, struct layer **out, struct index **index,
                      struct fault *fault)
{
    struct lsmt_header *header = malloc(sizeof *header);
    int rc = header ? 0 : fault_set(fault, ENOMEM, "memory", "out of memory");
    if (!rc && source->size < 2 * LSMT_BLOCK)
        rc = fault_set(fault, EBADMSG, "file", "%llu bytes are too few for a layer", (unsigned long long)source->size);
    if (!rc && !(rc = read_block(source, header, ROLE_HEADER, fault))) {
        bool committed = header->flags & LSMT_SEALED;
        if (!(rc = read_block(source, header, ROLE_TRAILER, fault)))
            rc = load_entries(source, header, committed, index, fault);
    }
    if (!rc) {
        header_info(header, info);
        info->index_entries = header->index_size;
        info->data_bytes = header->index_offset - LSMT_BLOCK;
        if (!(*out = layer_new(source, info))) {
            index_unref(*index);
            rc = fault_set(fault, ENOMEM, "memory", "out of memory");
        } else {
            (*out)->index_offset = header->index_offset;
        }
    }
    if (rc)
        source->close(source);
    free(header);
    return rc;
}

int layer_open(const char *path, struct layer **out, struct index **index, struct fault *fault)
{
    struct layer_info info = {0};
    struct source *source;
    int rc = source_open(path, &source, info.kind, fault);
    return rc ? rc : load_layer(source, &info, out, index, fault);
}

int layer_open_source(struct source *source, struct layer **out, struct index **index, struct fault *fault)
{
    struct layer_info info = {0};
    struct source *inner;
    int rc = source_unwrap(source, &inner, info.kind, fault);
    return rc ? rc : load_layer(inner, &info, out, index, fault);
}
