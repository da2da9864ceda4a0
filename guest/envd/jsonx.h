/* Reading protobuf-style JSON: a field may be spelled in camelCase or in snake_case, null means absent, integers may
 * be strings, unknown fields are ignored. And base64. */
#ifndef ENVD_JSONX_H
#define ENVD_JSONX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <jansson.h>

enum jx {
	JX_BAD = -1,    /* present, with the wrong type or out of range; *out is untouched */
	JX_ABSENT = 0,  /* *out is untouched: set the default before */
	JX_OK = 1,
};

json_t *jx_get(const json_t *object, const char *camel); /* borrowed; NULL: absent or null */
enum jx jx_string(const json_t *object, const char *camel, const char **out); /* borrowed */
enum jx jx_bool(const json_t *object, const char *camel, bool *out);
enum jx jx_u32(const json_t *object, const char *camel, uint32_t *out);
enum jx jx_object(const json_t *object, const char *camel, json_t **out); /* borrowed */
enum jx jx_array(const json_t *object, const char *camel, json_t **out);  /* borrowed */
/* Base64, standard or URL alphabet, padding optional; *out malloc'ed (never NULL on JX_OK). */
enum jx jx_bytes(const json_t *object, const char *camel, uint8_t **out, size_t *len);

char *base64_encode_text(const void *data, size_t len, bool padding); /* malloc'ed, NUL-terminated */
bool base64_decode_text(const char *text, size_t len, uint8_t **out, size_t *out_len);

#endif
