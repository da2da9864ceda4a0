/* The ZFile container: header 512 | compressed blocks | jump table | trailer 512. */
#ifndef AENV_LSMT_ZFILE_H
#define AENV_LSMT_ZFILE_H

#include "lsmt.h"

#define ZFILE_HEADER 512u
#define ZFILE_BLOCK_SEED 100007u /* initial register of the CRC after each block */

struct zfile_header {
    uint8_t magic0[8], magic1[16];
    uint32_t size, digest;
    uint64_t flags, index_offset, index_size, original_file_size;
    uint32_t index_crc, reserved0, block_size;
    uint8_t algo, level, use_dict, pad0;
    uint32_t reserved1, dict_size;
    uint8_t verify, pad1[7];
    uint8_t pad2[ZFILE_HEADER - 96];
} __attribute__((packed));
_Static_assert(sizeof(struct zfile_header) == ZFILE_HEADER, "ZFile header");
_Static_assert(offsetof(struct zfile_header, index_crc) == 64 && offsetof(struct zfile_header, verify) == 88, "ZFile");

enum zfile_flag {
    ZFILE_IS_HEADER = 1, ZFILE_IS_DATA = 2, ZFILE_SEALED = 4, ZFILE_OVERWRITTEN = 8, ZFILE_DIGEST = 16,
    ZFILE_INDEX_PACKED = 32,
};

extern const uint8_t ZFILE_MAGIC[24];

uint32_t zfile_digest(const struct zfile_header *header);

/* Block codecs; `level` of zstd is the reference tools' 3. They return the size or a negative errno. */
struct codec;
struct codec *codec_new(enum layer_form form);
void codec_free(struct codec *codec);
size_t codec_bound(enum layer_form form, size_t length);
long codec_compress(struct codec *codec, const void *in, size_t length, void *out, size_t room);

#endif
