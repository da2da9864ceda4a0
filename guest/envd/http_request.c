/* Reading a request: headers, query parameters, percent-encoding. */
#include <stdlib.h>
#include <string.h>

#include "http_internal.h"

const char *http_header(const struct http_request *req, const char *name)
{
	size_t i;

	for (i = 0; i < req->n_headers; i++)
		if (strcmp(req->headers[i].name, name) == 0)
			return req->headers[i].value;
	return NULL;
}

bool http_from_host(const struct http_request *req)
{
	return req->conn->from_host;
}

static int hex(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

char *http_percent_decode(const char *text, size_t len, bool plus_is_space)
{
	char *out = malloc(len + 1), *at = out;
	size_t i;

	if (!out)
		return NULL;
	for (i = 0; i < len; i++) {
		int c = (unsigned char)text[i];

		if (c == '%') {
			int high = i + 2 < len ? hex(text[i + 1]) : -1, low = i + 2 < len ? hex(text[i + 2]) : -1;

			c = high < 0 || low < 0 ? 0 : high << 4 | low;
			i += 2;
		} else if (c == '+' && plus_is_space) {
			c = ' ';
		}
		if (c == 0) {
			free(out);
			return NULL;
		}
		*at++ = (char)c;
	}
	*at = 0;
	return out;
}

char *http_query(const struct http_request *req, const char *name)
{
	const char *at = req->query;

	while (*at) {
		size_t len = strcspn(at, "&"), name_len = strcspn(at, "=&");
		char *key = http_percent_decode(at, name_len, true);
		bool found = key && strcmp(key, name) == 0;

		free(key);
		if (found) {
			if (name_len == len)
				return strdup("");
			return http_percent_decode(at + name_len + 1, len - name_len - 1, true);
		}
		at += len;
		at += *at == '&';
	}
	return NULL;
}
