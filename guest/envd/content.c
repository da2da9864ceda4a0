#define _GNU_SOURCE
#include "content.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define BINARY "application/octet-stream"

static const struct {
	const char *extension, *type;
} TYPES[] = {
	{"7z", "application/x-7z-compressed"},
	{"avif", "image/avif"},
	{"bmp", "image/bmp"},
	{"bz2", "application/x-bzip2"},
	{"c", "text/x-c; charset=utf-8"},
	{"css", "text/css; charset=utf-8"},
	{"csv", "text/csv; charset=utf-8"},
	{"gif", "image/gif"},
	{"gz", "application/gzip"},
	{"htm", "text/html; charset=utf-8"},
	{"html", "text/html; charset=utf-8"},
	{"ico", "image/x-icon"},
	{"ipynb", "application/x-ipynb+json"},
	{"jpeg", "image/jpeg"},
	{"jpg", "image/jpeg"},
	{"js", "text/javascript; charset=utf-8"},
	{"json", "application/json"},
	{"md", "text/markdown; charset=utf-8"},
	{"mjs", "text/javascript; charset=utf-8"},
	{"mp3", "audio/mpeg"},
	{"mp4", "video/mp4"},
	{"ogg", "audio/ogg"},
	{"pdf", "application/pdf"},
	{"png", "image/png"},
	{"py", "text/x-python; charset=utf-8"},
	{"sh", "text/x-sh; charset=utf-8"},
	{"svg", "image/svg+xml"},
	{"tar", "application/x-tar"},
	{"tif", "image/tiff"},
	{"tiff", "image/tiff"},
	{"toml", "application/toml"},
	{"ts", "text/plain; charset=utf-8"},
	{"txt", "text/plain; charset=utf-8"},
	{"wasm", "application/wasm"},
	{"wav", "audio/wav"},
	{"webm", "video/webm"},
	{"webp", "image/webp"},
	{"woff", "font/woff"},
	{"woff2", "font/woff2"},
	{"xml", "text/xml; charset=utf-8"},
	{"xz", "application/x-xz"},
	{"yaml", "application/yaml"},
	{"yml", "application/yaml"},
	{"zip", "application/zip"},
	{"zst", "application/zstd"},
};

static bool looks_like_text(const unsigned char *sample, size_t length)
{
	for (size_t i = 0; i < length; i++)
		if (sample[i] < 0x20 && !memchr("\t\n\r\f\x1b", sample[i], 5))
			return false;
	return length > 0;
}

const char *content_type(const char *name, const void *sample, size_t length)
{
	const char *dot = strrchr(name, '.');

	for (size_t i = 0; dot && i < sizeof TYPES / sizeof *TYPES; i++)
		if (strcasecmp(dot + 1, TYPES[i].extension) == 0)
			return TYPES[i].type;
	return looks_like_text(sample, length) ? "text/plain; charset=utf-8" : BINARY;
}

bool content_compressible(const char *type)
{
	return strncmp(type, "text/", 5) == 0 || strstr(type, "json") || strstr(type, "xml") || strstr(type, "yaml") ||
	       strstr(type, "toml") || strstr(type, "wasm");
}

/* RFC 8187: UTF-8 bytes, percent-encoded except for attr-char. */
static void extended_name(const char *name, char *out)
{
	out += sprintf(out, "inline; filename*=utf-8''");
	for (const unsigned char *in = (const unsigned char *)name; *in; in++)
		if (*in < 0x80 && (isalnum(*in) || strchr("!#$&+-.^_`|~", *in)))
			*out++ = *in;
		else
			out += sprintf(out, "%%%02X", *in);
	*out = '\0';
}

void content_disposition(const char *name, char out[CONTENT_DISPOSITION_MAX])
{
	for (const unsigned char *in = (const unsigned char *)name; *in; in++)
		if (*in < 0x20 || *in >= 0x7F) {
			extended_name(name, out);
			return;
		}
	out += sprintf(out, "inline; filename=\"");
	for (; *name; name++) {
		if (*name == '"' || *name == '\\')
			*out++ = '\\';
		*out++ = *name;
	}
	strcpy(out, "\"");
}

/* The weight after a coding's name, 0 to 1000. What is no weight counts as 1. */
static int weight(const char *parameters, size_t length)
{
	const char *q = memmem(parameters, length, "q=", 2);
	char text[8] = "", *end;

	if (!q)
		q = memmem(parameters, length, "Q=", 2);
	if (!q)
		return 1000;
	snprintf(text, sizeof text, "%.*s", (int)(parameters + length - q - 2), q + 2);
	double value = strtod(text, &end);
	return end == text || !(value >= 0 && value <= 1) ? 1000 : (int)(value * 1000);
}

struct content_codings content_codings(const char *accept)
{
	int gzip = -1, identity = -1, any = -1;
	bool others = false;

	for (const char *at = accept ? accept : ""; *at;) {
		size_t length = strcspn(at, ","), blank = strspn(at, " \t"), name = strcspn(at + blank, " \t;,");
		const char *coding = at + blank;
		int q = weight(coding + name, blank + name < length ? length - blank - name : 0);
		if ((name == 4 && strncasecmp(coding, "gzip", 4) == 0) ||
		    (name == 6 && strncasecmp(coding, "x-gzip", 6) == 0))
			gzip = q;
		else if (name == 8 && strncasecmp(coding, "identity", 8) == 0)
			identity = q;
		else if (name == 1 && *coding == '*')
			any = q;
		else if (name > 0 && q > 0)
			others = true;
		at += length;
		at += *at == ',';
	}
	struct content_codings codings = {
		.gzip = gzip > 0 || (gzip < 0 && any > 0),
		.identity = identity > 0 || (identity < 0 && any != 0),
	};
	codings.wants_gzip = gzip > 0 && !others && any < 0;
	codings.wants_identity = identity > 0 && identity > (gzip >= 0 ? gzip : any);
	return codings;
}

/* Digits only, at least one; false on overflow. */
static bool number(const char **at, uint64_t *out)
{
	const char *start = *at;

	for (*out = 0; isdigit((unsigned char)**at); (*at)++) {
		uint64_t digit = **at - '0';
		if (*out > (UINT64_MAX - digit) / 10)
			return false;
		*out = *out * 10 + digit;
	}
	return *at > start;
}

static enum content_range suffix_range(const char *at, uint64_t size, uint64_t *start, uint64_t *length)
{
	uint64_t last;

	if (!number(&at, &last) || *at != '\0' || last == 0)
		return RANGE_UNSATISFIABLE;
	*length = last < size ? last : size;
	*start = size - *length;
	return RANGE_PART;
}

enum content_range content_range(const char *header, uint64_t size, uint64_t *start, uint64_t *length)
{
	uint64_t end;

	if (!header || strncasecmp(header, "bytes=", 6) != 0 || strchr(header, ',') || size == 0)
		return RANGE_WHOLE;
	const char *at = header + 6;
	if (*at == '-')
		return suffix_range(at + 1, size, start, length);
	if (!number(&at, start) || *at++ != '-')
		return RANGE_UNSATISFIABLE;
	if (*at == '\0')
		end = size - 1;
	else if (!number(&at, &end) || *at != '\0' || end < *start)
		return RANGE_UNSATISFIABLE;
	if (*start >= size)
		return RANGE_UNSATISFIABLE;
	*length = (end < size ? end : size - 1) - *start + 1;
	return RANGE_PART;
}

void content_date_text(time_t when, char out[CONTENT_DATE_MAX])
{
	struct tm tm;

	gmtime_r(&when, &tm);
	strftime(out, CONTENT_DATE_MAX, "%a, %d %b %Y %H:%M:%S GMT", &tm);
}

bool content_date(const char *text, time_t *out)
{
	struct tm tm = {0};
	const char *end = strptime(text, "%a, %d %b %Y %H:%M:%S GMT", &tm);

	if (!end || *end)
		return false;
	*out = timegm(&tm);
	return true;
}
