/* A form gives the same parts and the same verdict however its body is cut. */
#include "fuzz.h"
#include "multipart.h"

/* What the parser has said, as a sum over everything. */
struct outcome {
	uint64_t sum;
	size_t parts, open;
	size_t stop_after; /* parts; 0: never */
	bool fine, complete, error;
};

static void add(struct outcome *outcome, const void *data, size_t length)
{
	const uint8_t *at = data;

	while (length-- > 0)
		outcome->sum = (outcome->sum ^ *at++) * 1099511628211u;
}

static bool on_part(void *context, const char *field, const char *filename)
{
	struct outcome *outcome = context;

	CHECK(outcome->open == 0);
	outcome->open = 1;
	outcome->parts++;
	add(outcome, field ? field : "\1", field ? strlen(field) + 1 : 1);
	add(outcome, filename ? filename : "\1", filename ? strlen(filename) + 1 : 1);
	return outcome->parts != outcome->stop_after;
}

static bool on_data(void *context, const char *data, size_t length)
{
	struct outcome *outcome = context;

	CHECK(outcome->open == 1 && length > 0);
	add(outcome, data, length);
	return true;
}

static bool on_end(void *context)
{
	struct outcome *outcome = context;

	CHECK(outcome->open == 1);
	outcome->open = 0;
	add(outcome, "\2", 1);
	return true;
}

static const struct multipart_events EVENTS = {on_part, on_data, on_end};

static struct outcome parse(const char *type, const uint8_t *data, size_t size, size_t piece_size, size_t stop_after)
{
	struct outcome outcome = {.sum = 14695981039346656037u, .stop_after = stop_after, .fine = true};
	struct multipart *multipart = multipart_new(type, &EVENTS, &outcome);
	struct input input = {data, size};

	if (!multipart)
		return outcome;
	while (input.left > 0 && outcome.fine) {
		size_t length = piece_size;
		char *piece = take_piece(&input, &length);

		outcome.fine = multipart_feed(multipart, piece, length);
		free(piece);
	}
	outcome.complete = multipart_complete(multipart);
	outcome.error = multipart_error(multipart) != NULL;
	CHECK(!outcome.complete || outcome.open == 0);
	multipart_free(multipart);
	return outcome;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	size_t piece = 1 + take_byte(&input), stop_after = take_byte(&input) % 8;
	const uint8_t *line = memchr(input.at, '\n', input.left);
	size_t type_length = line ? (size_t)(line - input.at) : input.left;
	char *type = take_text(&input, type_length);
	struct outcome whole, cut;

	take_byte(&input); /* the line's end */
	whole = parse(type, input.at, input.left, input.left, stop_after);
	cut = parse(type, input.at, input.left, piece, stop_after);
	CHECK(whole.sum == cut.sum && whole.parts == cut.parts && whole.open == cut.open);
	CHECK(whole.fine == cut.fine && whole.complete == cut.complete && whole.error == cut.error);
	free(type);
	return 0;
}
