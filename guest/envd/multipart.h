/* Streaming parser of multipart bodies (RFC 2046, RFC 7578). Memory use does not depend on the body: bytes go through
 * as they come, cut anywhere, and only the header section of a part is kept. */
#ifndef ENVD_MULTIPART_H
#define ENVD_MULTIPART_H

#include <stdbool.h>
#include <stddef.h>

struct multipart;

/* Each returns false to stop the parsing. */
struct multipart_events {
	/* `field` and `filename` are NULL when the part does not name them. */
	bool (*part)(void *context, const char *field, const char *filename);
	bool (*data)(void *context, const char *data, size_t length);
	bool (*end)(void *context);
};

/* `content_type` is the header's value; NULL when it is not multipart/form-data with a usable boundary. */
struct multipart *multipart_new(const char *content_type, const struct multipart_events *events, void *context);
/* False when the body is malformed (see multipart_error) or an event has stopped the parsing. */
bool multipart_feed(struct multipart *multipart, const char *data, size_t length);
/* What is wrong with the body; NULL: nothing. */
const char *multipart_error(const struct multipart *multipart);
/* The closing boundary has come. */
bool multipart_complete(const struct multipart *multipart);
void multipart_free(struct multipart *multipart);

#endif
