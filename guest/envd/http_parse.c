/* Requests in: http_parser's callbacks gather the header section, make the request and pass its body on. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "http_internal.h"

static struct http_connection *connection_of(http_parser *parser)
{
	return parser->data;
}

/* Ends parsing with an HTTP status. (From on_headers_complete 1 and 2 would mean something else than an error.) */
static int refuse(struct http_connection *conn, int status)
{
	conn->refuse = status;
	return -1;
}

void http_head_free(struct http_connection *conn)
{
	if (conn->head)
		free(conn->head->text);
	free(conn->head);
	conn->head = NULL;
}

static bool head_append(struct http_head *head, const char *data, size_t len)
{
	if (head->len + len > head->size) {
		size_t size = head->size ? head->size * 2 : 1024;
		char *text;

		while (size < head->len + len)
			size *= 2;
		text = realloc(head->text, size);
		if (!text)
			return false;
		head->text = text;
		head->size = size;
	}
	memcpy(head->text + head->len, data, len);
	head->len += len;
	return true;
}

static int take(struct http_connection *conn, const char *data, size_t len)
{
	if (conn->head->len + len > HTTP_MAX_HEAD_BYTES)
		return refuse(conn, 431);
	return head_append(conn->head, data, len) ? 0 : refuse(conn, 503);
}

static int on_begin(http_parser *parser)
{
	struct http_connection *conn = connection_of(parser);

	conn->head = calloc(1, sizeof *conn->head);
	conn->head_since = conn->progress;
	return conn->head ? 0 : refuse(conn, 503);
}

static int on_target(http_parser *parser, const char *data, size_t len)
{
	struct http_connection *conn = connection_of(parser);

	conn->head->target_len += len;
	return take(conn, data, len);
}

static int on_field(http_parser *parser, const char *data, size_t len)
{
	struct http_connection *conn = connection_of(parser);
	struct http_head *head = conn->head;

	if (!head) /* trailer fields of a chunked body: allowed, ignored, bounded by the parser */
		return 0;
	if (head->n_fields == 0 || head->in_value) {
		if (head->n_fields == HTTP_MAX_HEADERS)
			return refuse(conn, 431);
		head->fields[head->n_fields++].name = head->len;
		head->in_value = false;
	}
	head->fields[head->n_fields - 1].name_len += len;
	return take(conn, data, len);
}

static int on_value(http_parser *parser, const char *data, size_t len)
{
	struct http_connection *conn = connection_of(parser);
	struct http_head *head = conn->head;

	if (!head)
		return 0;
	if (!head->in_value) {
		head->fields[head->n_fields - 1].value = head->len;
		head->in_value = true;
	}
	head->fields[head->n_fields - 1].value_len += len;
	return take(conn, data, len);
}

/* ---- the request ---- */

static void lower(char *text)
{
	for (; *text; text++)
		if (*text >= 'A' && *text <= 'Z')
			*text += 'a' - 'A';
}

/* The parser lets a space pass within or behind a name: "Content-Length : 5" is a header to some and not to others. */
static bool is_token(const char *text)
{
	return *text && strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~") == strlen(text);
}

static bool copy_headers(struct http_request *req, const struct http_head *head)
{
	size_t i;

	req->headers = calloc(head->n_fields ? head->n_fields : 1, sizeof *req->headers);
	if (!req->headers)
		return false;
	for (i = 0; i < head->n_fields; i++) {
		struct http_header *header = &req->headers[req->n_headers++];
		size_t value_len = head->fields[i].value_len;
		const char *value = head->text + (value_len ? head->fields[i].value : 0);

		while (value_len > 0 && (value[value_len - 1] == ' ' || value[value_len - 1] == '\t'))
			value_len--;
		header->name = strndup(head->text + head->fields[i].name, head->fields[i].name_len);
		header->value = strndup(value, value_len);
		if (!header->name || !header->value)
			return false;
		lower(header->name);
	}
	return true;
}

/* origin-form "/path?query", absolute-form "http://host/path?query", or "*". */
static int set_target(struct http_request *req, const char *target, size_t len)
{
	const char *end = target + len, *path = target, *query;

	if (len >= 7 && strncasecmp(target, "http://", 7) == 0) {
		path = target + 7;
		while (path < end && *path != '/' && *path != '?')
			path++;
	}
	query = memchr(path, '?', (size_t)(end - path));
	if (!query)
		query = end;
	req->path = path == query && path != target ? strdup("/")
						    : http_percent_decode(path, (size_t)(query - path), false);
	req->query = query < end ? strndup(query + 1, (size_t)(end - query - 1)) : strdup("");
	if (!req->path)
		return 400;
	return req->query ? 0 : 503;
}

static size_t count_headers(const struct http_request *req, const char *name)
{
	size_t i, n = 0;

	for (i = 0; i < req->n_headers; i++)
		n += strcmp(req->headers[i].name, name) == 0;
	return n;
}

static int check_request(const http_parser *parser, const struct http_request *req)
{
	size_t i;

	for (i = 0; i < req->n_headers; i++)
		if (!is_token(req->headers[i].name))
			return 400;
	if (parser->http_major != 1 || parser->http_minor > 1)
		return 505;
	if (!req->http10 && count_headers(req, "host") != 1)
		return 400;
	if (count_headers(req, "content-length") > 1 || count_headers(req, "transfer-encoding") > 1)
		return 400; /* two framings: someone on the way may see another message than we do */
	if (count_headers(req, "content-length") && count_headers(req, "transfer-encoding"))
		return 400;
	if (parser->content_length != UINT64_MAX && parser->content_length > INT64_MAX) /* the parser's "none" is UINT64_MAX */
		return 413;
	if (count_headers(req, "transfer-encoding") &&
	    (req->http10 || strcasecmp(http_header(req, "transfer-encoding"), "chunked") != 0))
		return req->http10 ? 400 : 501;
	if (http_header(req, "expect") && strcasecmp(http_header(req, "expect"), "100-continue") != 0)
		return 417;
	return 0;
}

static struct http_request *request_new(struct http_connection *conn, int *status)
{
	http_parser *parser = &conn->parser;
	struct http_request *req = calloc(1, sizeof *req);

	*status = 503;
	if (!req)
		return NULL;
	req->envd = conn->server->envd;
	req->conn = conn;
	req->method = http_method_str(parser->method);
	req->http10 = parser->http_major == 1 && parser->http_minor == 0;
	req->head_only = parser->method == HTTP_HEAD;
	req->keep_alive = http_should_keep_alive(parser);
	req->content_length = parser->content_length == UINT64_MAX ? 0 : (int64_t)parser->content_length;
	if (parser->flags & F_CHUNKED)
		req->content_length = -1;
	if (copy_headers(req, conn->head)) {
		*status = set_target(req, conn->head->text, conn->head->target_len);
		if (*status == 0)
			*status = check_request(parser, req);
	}
	if (*status == 0)
		return req;
	request_free(req);
	return NULL;
}

static int on_headers(http_parser *parser)
{
	struct http_connection *conn = connection_of(parser);
	int status;

	conn->req = request_new(conn, &status);
	http_head_free(conn);
	if (!conn->req)
		return refuse(conn, status);
	conn->discarded = 0;
	parser->upgrade = 0; /* http_upgrade() needs no help; other upgrades are not taken, the request is plain */
	http_dispatch(conn->req);
	if (conn->req->body_paused)
		http_parser_pause(parser, 1);
	return 0;
}

static int on_body(http_parser *parser, const char *data, size_t len)
{
	struct http_connection *conn = connection_of(parser);
	struct http_request *req = conn->req;

	if (req->finished || !req->on_body) {
		conn->discarded += len;
		if (conn->discarded > HTTP_MAX_DISCARD)
			http_parser_pause(parser, 1);
		return 0;
	}
	req->body_seen += len;
	req->on_body(req, data, len);
	if (req->body_paused && !req->finished)
		http_parser_pause(parser, 1);
	return 0;
}

static int on_complete(http_parser *parser)
{
	struct http_request *req = connection_of(parser)->req;

	req->body_complete = true;
	if (!req->finished && req->on_end)
		req->on_end(req);
	http_parser_pause(parser, 1); /* until the answer is out */
	return 0;
}

void http_parse_init(http_parser_settings *settings)
{
	http_parser_settings_init(settings);
	settings->on_message_begin = on_begin;
	settings->on_url = on_target;
	settings->on_header_field = on_field;
	settings->on_header_value = on_value;
	settings->on_headers_complete = on_headers;
	settings->on_body = on_body;
	settings->on_message_complete = on_complete;
}

void http_parse_reset(struct http_connection *conn)
{
	http_parser_init(&conn->parser, HTTP_REQUEST);
	conn->parser.data = conn;
}

size_t http_parse(struct http_connection *conn, const char *data, size_t len)
{
	http_parser *parser = &conn->parser;
	size_t taken;

	if (HTTP_PARSER_ERRNO(parser) == HPE_PAUSED)
		http_parser_pause(parser, 0);
	taken = http_parser_execute(parser, &conn->server->settings, data, len);
	switch (HTTP_PARSER_ERRNO(parser)) {
	case HPE_OK:
	case HPE_PAUSED:
		break;
	case HPE_HEADER_OVERFLOW:
		conn->refuse = 431;
		break;
	default:
		if (!conn->refuse)
			conn->refuse = 400;
	}
	return taken;
}
