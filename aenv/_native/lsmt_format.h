/* Header and trailer of an LSMT file: 390 bytes in a zero-padded block of 4096. */
#ifndef AENV_LSMT_FORMAT_H
#define AENV_LSMT_FORMAT_H

#include "lsmt.h"

struct lsmt_header {
    uint8_t magic0[8], magic1[16];
    uint32_t size, flags;
    uint64_t index_offset; /* bytes */
    uint64_t index_size;   /* entries */
    uint64_t virtual_size; /* bytes */
    char uuid[LSMT_UUID], parent_uuid[LSMT_UUID];
    uint16_t reserved;
    uint8_t version, sub_version;
    char user_tag[LSMT_TAG];
    uint8_t pad[LSMT_BLOCK - 390];
} __attribute__((packed));
_Static_assert(sizeof(struct lsmt_header) == LSMT_BLOCK, "LSMT header");
_Static_assert(offsetof(struct lsmt_header, uuid) == 56 && offsetof(struct lsmt_header, user_tag) == 134, "LSMT header");

enum lsmt_flag {
    LSMT_IS_HEADER = 1, LSMT_IS_DATA = 2, LSMT_SEALED = 4, LSMT_GC = 8, LSMT_SPARSE = 16, LSMT_INFO_VALID = 32,
};

enum lsmt_role { ROLE_HEADER, ROLE_TRAILER, ROLE_INDEX_HEADER };

/* A header with magic, sizes and texts set. Texts may be NULL; they must fit. */
void header_fill(struct lsmt_header *header, uint32_t flags, uint64_t virtual_size, const char *uuid,
                 const char *parent_uuid, const char *user_tag);
int header_check(const struct lsmt_header *header, enum lsmt_role role, struct fault *fault);
int text_check(const char *uuid, const char *parent_uuid, const char *user_tag, struct fault *fault);
void header_info(const struct lsmt_header *header, struct layer_info *info);

/* Checks, sorts out padding and joins what is adjacent, in place; gives the new count. `index_offset`: bytes. */
int entries_check(struct segment *entries, size_t *count, uint64_t index_offset, struct fault *fault);

#endif
