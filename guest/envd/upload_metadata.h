/* User metadata in the headers of an upload. */
#ifndef ENVD_UPLOAD_METADATA_H
#define ENVD_UPLOAD_METADATA_H

#include <stdbool.h>
#include <jansson.h>

struct http_request;

/* The X-Metadata-<key> headers as an object of strings, keys in lower case; of a repeated header the first counts.
 * *metadata is NULL when there is none. False after a 400 was sent. */
bool upload_metadata(struct http_request *req, json_t **metadata);

#endif
