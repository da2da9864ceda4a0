#include "jsonx.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <nettle/base64.h>

static bool snake(const char *camel, char *out, size_t size)
{
	size_t at = 0;

	for (; *camel; camel++) {
		bool upper = *camel >= 'A' && *camel <= 'Z';

		if (at + 3 > size)
			return false;
		if (upper)
			out[at++] = '_';
		out[at++] = upper ? (char)(*camel - 'A' + 'a') : *camel;
	}
	out[at] = 0;
	return true;
}

json_t *jx_get(const json_t *object, const char *camel)
{
	json_t *value = json_object_get(object, camel);
	char name[64];

	if (!value && snake(camel, name, sizeof name))
		value = json_object_get(object, name);
	return json_is_null(value) ? NULL : value;
}

enum jx jx_string(const json_t *object, const char *camel, const char **out)
{
	json_t *value = jx_get(object, camel);

	if (!value)
		return JX_ABSENT;
	if (!json_is_string(value))
		return JX_BAD;
	*out = json_string_value(value);
	return JX_OK;
}

enum jx jx_bool(const json_t *object, const char *camel, bool *out)
{
	json_t *value = jx_get(object, camel);

	if (!value)
		return JX_ABSENT;
	if (!json_is_boolean(value))
		return JX_BAD;
	*out = json_is_true(value);
	return JX_OK;
}

static bool u32_of_text(const char *text, uint32_t *out)
{
	unsigned long long number;
	char *end;

	if (*text < '0' || *text > '9')
		return false;
	errno = 0;
	number = strtoull(text, &end, 10);
	if (*end || errno || number > UINT32_MAX)
		return false;
	*out = (uint32_t)number;
	return true;
}

enum jx jx_u32(const json_t *object, const char *camel, uint32_t *out)
{
	json_t *value = jx_get(object, camel);

	if (!value)
		return JX_ABSENT;
	if (json_is_string(value))
		return u32_of_text(json_string_value(value), out) ? JX_OK : JX_BAD;
	if (json_is_real(value)) { /* protobuf allows 3.0 */
		double number = json_real_value(value);

		if (!(number >= 0 && number <= UINT32_MAX) || number != (double)(uint32_t)number)
			return JX_BAD;
		*out = (uint32_t)number;
		return JX_OK;
	}
	if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > UINT32_MAX)
		return JX_BAD;
	*out = (uint32_t)json_integer_value(value);
	return JX_OK;
}

enum jx jx_object(const json_t *object, const char *camel, json_t **out)
{
	json_t *value = jx_get(object, camel);

	if (!value)
		return JX_ABSENT;
	if (!json_is_object(value))
		return JX_BAD;
	*out = value;
	return JX_OK;
}

enum jx jx_array(const json_t *object, const char *camel, json_t **out)
{
	json_t *value = jx_get(object, camel);

	if (!value)
		return JX_ABSENT;
	if (!json_is_array(value))
		return JX_BAD;
	*out = value;
	return JX_OK;
}

enum jx jx_bytes(const json_t *object, const char *camel, uint8_t **out, size_t *len)
{
	json_t *value = jx_get(object, camel);

	if (!value)
		return JX_ABSENT;
	if (!json_is_string(value))
		return JX_BAD;
	return base64_decode_text(json_string_value(value), json_string_length(value), out, len) ? JX_OK : JX_BAD;
}

char *base64_encode_text(const void *data, size_t len, bool padding)
{
	size_t size = BASE64_ENCODE_RAW_LENGTH(len);
	char *text = malloc(size + 1);

	if (!text)
		return NULL;
	base64_encode_raw(text, len, data);
	text[size] = 0;
	if (!padding)
		text[strcspn(text, "=")] = 0;
	return text;
}

bool base64_decode_text(const char *text, size_t len, uint8_t **out, size_t *out_len)
{
	struct base64_decode_ctx context;
	size_t chars = len, size = BASE64_DECODE_LENGTH(len + 4);

	while (chars > 0 && text[chars - 1] == '=')
		chars--;
	if (chars % 4 == 1 || (chars < len && (len % 4 != 0 || len - chars > 2)))
		return false; /* padding, where there is some, fills exactly one group */
	*out = malloc(size + 1);
	if (!*out)
		return false;
	*out_len = size;
	if (memchr(text, '-', chars) || memchr(text, '_', chars))
		base64url_decode_init(&context);
	else
		base64_decode_init(&context);
	if (base64_decode_update(&context, out_len, *out, chars, text)) {
		size_t tail_len = size;
		uint8_t tail[8];
		const char *pad = "===";

		if (chars % 4 == 0)
			return true;
		if (base64_decode_update(&context, &tail_len, tail, (4 - chars % 4), pad) && tail_len == 0 &&
		    base64_decode_final(&context))
			return true;
	}
	free(*out);
	*out = NULL;
	return false;
}
