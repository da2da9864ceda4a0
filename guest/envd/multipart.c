#define _GNU_SOURCE
#include "multipart.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define BOUNDARY_MAX 200 /* RFC 2046 says 70; some clients use more */
#define HEADER_MAX 16384
#define PADDING_MAX 64 /* blanks between a boundary and its line end */

enum state {
	STATE_BODY,	/* before the first boundary, or in a part */
	STATE_BOUNDARY, /* right after a delimiter: is it really one? */
	STATE_PADDING,	/* blanks after it */
	STATE_DASH,	/* it is followed by one '-' */
	STATE_NEWLINE,	/* it is followed by CR */
	STATE_HEADER,
	STATE_COMPLETE,
};

struct multipart {
	const struct multipart_events *events;
	void *context;
	const char *error;
	enum state state;
	bool in_part;
	size_t matched; /* bytes of the delimiter that the end of the input so far matches */
	size_t padding;
	size_t delimiter_length;
	char delimiter[BOUNDARY_MAX + 5]; /* CRLF "--" boundary */
	size_t header_length;
	char header[HEADER_MAX + 1];
};

/* One `name=value` after `at`, a token or a quoted string; NULL when there is none. In a quoted string only \" and
 * \\ are escapes: browsers do not escape the backslashes of file names. *value is malloc'ed. */
static const char *parameter(const char *at, char **name, char **value)
{
	at += strspn(at, " \t;");
	size_t length = strcspn(at, "= \t;");
	if (length == 0 || at[length] != '=')
		return NULL;
	*name = strndup(at, length);
	at += length + 1;
	*value = malloc(strlen(at) + 1);
	if (!*name || !*value)
		goto failed;
	char *out = *value;
	if (*at != '"') {
		length = strcspn(at, " \t;");
		*(char *)mempcpy(out, at, length) = '\0';
		return at + length;
	}
	for (at++; *at && *at != '"'; at++) {
		if (*at == '\\' && (at[1] == '"' || at[1] == '\\'))
			at++;
		*out++ = *at;
	}
	*out = '\0';
	if (*at == '"')
		return at + 1;
failed:
	free(*name);
	free(*value);
	return NULL;
}

/* The parameter of a header value such as `form-data; name="a"`, malloc'ed, or NULL. */
static char *find_parameter(const char *header, const char *wanted)
{
	char *name, *value;
	const char *at = header + strcspn(header, ";");

	while ((at = parameter(at, &name, &value))) {
		bool found = strcasecmp(name, wanted) == 0;
		free(name);
		if (found)
			return value;
		free(value);
	}
	return NULL;
}

static int hex_digit(char c)
{
	const char *digits = "0123456789abcdef", *found = c ? strchr(digits, c | 0x20) : NULL;

	return found ? found - digits : -1;
}

/* RFC 8187: charset'language'percent-encoded. Only UTF-8 is a charset here. NULL when it is something else. */
static char *decode_extended(const char *text)
{
	const char *at = strncasecmp(text, "utf-8'", 6) == 0 ? strchr(text + 6, '\'') : NULL;
	char *out = at ? malloc(strlen(at)) : NULL, *end = out;

	if (!out)
		return NULL;
	for (at++; *at; at++) {
		int high = *at == '%' ? hex_digit(at[1]) : -1, low = high >= 0 ? hex_digit(at[2]) : -1;
		if (*at == '%' && (high < 0 || low < 0 || high + low == 0)) {
			free(out);
			return NULL;
		}
		*end++ = *at == '%' ? high << 4 | low : *at;
		at += *at == '%' ? 2 : 0;
	}
	*end = '\0';
	return out;
}

static char *find_filename(const char *disposition)
{
	char *extended = find_parameter(disposition, "filename*");
	char *name = extended ? decode_extended(extended) : NULL;

	free(extended);
	return name ? name : find_parameter(disposition, "filename");
}

static bool is_blank(char c)
{
	return c == ' ' || c == '\t';
}

/* The value of Content-Disposition in the kept header section, NUL-terminated in place; NULL when it is absent. */
static char *find_disposition(struct multipart *multipart)
{
	static const char NAME[] = "content-disposition:";

	for (char *line = multipart->header; *line;) {
		char *end = strstr(line, "\r\n");
		if (!end)
			end = line + strlen(line);
		if (strncasecmp(line, NAME, strlen(NAME)) == 0) {
			*end = '\0';
			return line + strlen(NAME);
		}
		line = *end ? end + 2 : end;
	}
	return NULL;
}

static bool fail(struct multipart *multipart, const char *error)
{
	multipart->error = error;
	return false;
}

static bool begin_part(struct multipart *multipart)
{
	if (strlen(multipart->header) != multipart->header_length)
		return fail(multipart, "NUL byte in the header of a part");
	char *disposition = find_disposition(multipart);
	char *field = disposition ? find_parameter(disposition, "name") : NULL;
	char *filename = disposition ? find_filename(disposition) : NULL;
	bool go_on = multipart->events->part(multipart->context, field, filename);

	free(field);
	free(filename);
	multipart->in_part = true;
	multipart->header_length = 0;
	return go_on;
}

static bool emit(struct multipart *multipart, const char *data, size_t length)
{
	return length == 0 || !multipart->in_part || multipart->events->data(multipart->context, data, length);
}

/* What looked like a delimiter is data. */
static bool emit_delimiter(struct multipart *multipart)
{
	multipart->state = STATE_BODY;
	multipart->matched = 0;
	return emit(multipart, multipart->delimiter, multipart->delimiter_length);
}

static bool end_part(struct multipart *multipart, enum state next)
{
	bool go_on = !multipart->in_part || multipart->events->end(multipart->context);

	multipart->in_part = false;
	multipart->matched = 0;
	multipart->state = next;
	return go_on;
}

/* Takes body bytes up to and including the next delimiter. The delimiter has CR at its start and nowhere else, so after
 * a mismatch no shorter match can be under way. */
static bool feed_body(struct multipart *multipart, const char **at, const char *end)
{
	while (*at < end && multipart->matched < multipart->delimiter_length) {
		if (multipart->matched == 0) {
			const char *cr = memchr(*at, '\r', end - *at);
			const char *stop = cr ? cr : end;
			if (!emit(multipart, *at, stop - *at))
				return false;
			*at = stop;
			if (!cr)
				return true;
			multipart->matched = 1;
			(*at)++;
		} else if (**at == multipart->delimiter[multipart->matched]) {
			multipart->matched++;
			(*at)++;
		} else {
			size_t matched = multipart->matched;
			multipart->matched = 0;
			if (!emit(multipart, multipart->delimiter, matched))
				return false;
		}
	}
	if (multipart->matched == multipart->delimiter_length)
		multipart->state = STATE_BOUNDARY;
	return true;
}

/* One byte after a delimiter; *taken is false when the byte is to be looked at again in the new state. */
static bool feed_boundary(struct multipart *multipart, char c, bool *taken)
{
	switch (multipart->state) {
	case STATE_BOUNDARY:
		multipart->padding = 0;
		if (c == '-')
			multipart->state = STATE_DASH;
		else if (c == '\r')
			multipart->state = STATE_NEWLINE;
		else if (is_blank(c))
			multipart->state = STATE_PADDING;
		else {
			*taken = false;
			return emit_delimiter(multipart);
		}
		return true;
	case STATE_DASH:
		if (c == '-')
			return end_part(multipart, STATE_COMPLETE);
		*taken = false;
		return emit_delimiter(multipart) && emit(multipart, "-", 1);
	case STATE_NEWLINE:
		if (c == '\n')
			return end_part(multipart, STATE_HEADER);
		*taken = false;
		if (multipart->padding)
			return fail(multipart, "malformed boundary line");
		if (!emit_delimiter(multipart))
			return false;
		multipart->matched = 1; /* the CR may begin the real delimiter */
		return true;
	default: /* STATE_PADDING */
		if (c == '\r')
			multipart->state = STATE_NEWLINE;
		else if (!is_blank(c) || multipart->padding > PADDING_MAX)
			return fail(multipart, "malformed boundary line");
		multipart->padding++;
		return true;
	}
}

static bool feed_header(struct multipart *multipart, char c)
{
	if (multipart->header_length == HEADER_MAX)
		return fail(multipart, "the header of a part is too long");
	multipart->header[multipart->header_length++] = c;
	multipart->header[multipart->header_length] = '\0';
	size_t length = multipart->header_length;
	bool empty = length == 2 && memcmp(multipart->header, "\r\n", 2) == 0;
	if (!empty && (length < 4 || memcmp(multipart->header + length - 4, "\r\n\r\n", 4) != 0))
		return true;
	multipart->state = STATE_BODY;
	multipart->matched = 0;
	return begin_part(multipart);
}

bool multipart_feed(struct multipart *multipart, const char *data, size_t length)
{
	const char *at = data, *end = data + length;

	while (at < end) {
		bool taken = true;
		switch (multipart->state) {
		case STATE_BODY:
			if (!feed_body(multipart, &at, end))
				return false;
			break;
		case STATE_HEADER:
			if (!feed_header(multipart, *at++))
				return false;
			break;
		case STATE_COMPLETE:
			return true; /* an epilogue means nothing */
		default:
			if (!feed_boundary(multipart, *at, &taken))
				return false;
			at += taken;
		}
	}
	return true;
}

struct multipart *multipart_new(const char *content_type, const struct multipart_events *events, void *context)
{
	static const char TYPE[] = "multipart/form-data";

	if (strncasecmp(content_type, TYPE, strlen(TYPE)) != 0)
		return NULL;
	char *boundary = find_parameter(content_type, "boundary");
	struct multipart *multipart = NULL;
	size_t length = boundary ? strlen(boundary) : 0;
	if (length > 0 && length <= BOUNDARY_MAX && !strpbrk(boundary, "\r\n"))
		multipart = calloc(1, sizeof *multipart);
	if (multipart) {
		multipart->events = events;
		multipart->context = context;
		memcpy(multipart->delimiter, "\r\n--", 4);
		memcpy(multipart->delimiter + 4, boundary, length);
		multipart->delimiter_length = length + 4;
		multipart->matched =
			2; /* the first boundary may stand at the very start, without a line end before it */
	}
	free(boundary);
	return multipart;
}

const char *multipart_error(const struct multipart *multipart)
{
	return multipart->error;
}

bool multipart_complete(const struct multipart *multipart)
{
	return multipart->state == STATE_COMPLETE;
}

void multipart_free(struct multipart *multipart)
{
	free(multipart);
}
