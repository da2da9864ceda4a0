#include "upload_metadata.h"

#include <string.h>

#include "entry.h"
#include "http.h"

#define HEADER "x-metadata-"

static bool is_printable_ascii(const char *text)
{
	for (; *text; text++)
		if (*text < 0x20 || *text > 0x7E)
			return false;
	return true;
}

/* Adds one header; false after a 400. */
static bool add(struct http_request *req, json_t *metadata, const struct http_header *header, size_t *total)
{
	const char *key = header->name + strlen(HEADER);

	if (json_object_get(metadata, key))
		return true;
	if (!*key || strlen(key) > ENTRY_METADATA_KEY_MAX) {
		http_reply_error(req, 400, "metadata key '%.64s' must have 1 to %d bytes", key, ENTRY_METADATA_KEY_MAX);
		return false;
	}
	if (!is_printable_ascii(key) || !is_printable_ascii(header->value)) {
		http_reply_error(req, 400, "metadata '%.64s' must be printable ASCII",
				 is_printable_ascii(key) ? key : "?");
		return false;
	}
	*total += strlen(ENTRY_XATTR_PREFIX) + strlen(key) + strlen(header->value);
	if (*total > ENTRY_METADATA_TOTAL_MAX) {
		http_reply_error(req, 400, "metadata is larger than %d bytes in all", ENTRY_METADATA_TOTAL_MAX);
		return false;
	}
	json_object_set_new(metadata, key, json_string(header->value));
	return true;
}

bool upload_metadata(struct http_request *req, json_t **metadata)
{
	json_t *found = json_object();
	size_t total = 0;

	*metadata = NULL;
	for (size_t i = 0; i < req->n_headers; i++) {
		if (strncmp(req->headers[i].name, HEADER, strlen(HEADER)) != 0)
			continue;
		if (!add(req, found, &req->headers[i], &total)) {
			json_decref(found);
			return false;
		}
	}
	if (json_object_size(found) > 0)
		*metadata = found;
	else
		json_decref(found);
	return true;
}
