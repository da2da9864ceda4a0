/* What HTTP says about a body: type, name, coding, ranges, dates (RFC 9110, RFC 6266). No input, no output. */
#ifndef ENVD_CONTENT_H
#define ENVD_CONTENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Media type by the name's extension, else by the first bytes: text or unknown. */
const char *content_type(const char *name, const void *sample, size_t length);
/* Types that deflate makes smaller. */
bool content_compressible(const char *type);

#define CONTENT_DISPOSITION_MAX 1024
/* `inline` with the file's name (at most NAME_MAX bytes), which may be any bytes. */
void content_disposition(const char *name, char out[CONTENT_DISPOSITION_MAX]);

struct content_codings {
	bool gzip;	     /* the client takes gzip */
	bool identity;	     /* the client takes the plain body */
	bool wants_gzip;     /* gzip is the only coding it names: somebody has asked for it */
	bool wants_identity; /* it prefers the plain body to gzip */
};
/* Of an Accept-Encoding header; NULL: absent. */
struct content_codings content_codings(const char *accept);

enum content_range {
	RANGE_WHOLE, /* no range, one of another unit, or several: the whole body answers all of them */
	RANGE_PART,
	RANGE_UNSATISFIABLE, /* or malformed */
};
enum content_range content_range(const char *header, uint64_t size, uint64_t *start, uint64_t *length);

#define CONTENT_DATE_MAX 40
void content_date_text(time_t when, char out[CONTENT_DATE_MAX]);
/* An HTTP date in its current form ("Sun, 06 Nov 1994 08:49:37 GMT"); false for everything else. */
bool content_date(const char *text, time_t *out);

#endif
