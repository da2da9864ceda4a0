/* Connect frames: the same messages however the bytes are cut, and no more memory than has come. */
#include "frame.h"
#include "fuzz.h"

enum { LIMIT = 1 << 16 };

struct outcome {
	uint64_t sum;
	size_t frames, total;
	enum frame_status last;
	int idle;
};

static void add(struct outcome *outcome, const void *data, size_t length)
{
	const uint8_t *at = data;

	while (length-- > 0)
		outcome->sum = (outcome->sum ^ *at++) * 1099511628211u;
}

static void feed(struct frame_reader *reader, struct outcome *outcome, const char *data, size_t length)
{
	while (length > 0 && (outcome->last == FRAME_MORE || outcome->last == FRAME_READY)) {
		size_t taken;

		outcome->last = frame_read(reader, data, length, &taken);
		CHECK(taken <= length && (taken > 0 || outcome->last != FRAME_READY));
		CHECK(reader->got <= reader->len && (reader->got == 0 || reader->len <= LIMIT));
		outcome->total += taken;
		CHECK(reader->size <= 512 || reader->size <= 2 * outcome->total);
		CHECK(outcome->last != FRAME_MORE || taken == length);
		data += taken;
		length -= taken;
		if (outcome->last == FRAME_READY) {
			uint8_t head[FRAME_HEAD];

			frame_head(head, reader->head[0], reader->len);
			CHECK(memcmp(head, reader->head, FRAME_HEAD) == 0);
			outcome->frames++;
			add(outcome, reader->data, reader->len);
			frame_next(reader);
			CHECK(frame_idle(reader));
		}
	}
}

static struct outcome read_all(const uint8_t *data, size_t size, size_t piece_size)
{
	struct outcome outcome = {14695981039346656037u, 0, 0, FRAME_MORE, 0};
	struct input input = {data, size};
	struct frame_reader reader;

	frame_init(&reader, LIMIT);
	while (input.left > 0 && (outcome.last == FRAME_MORE || outcome.last == FRAME_READY)) {
		size_t length = piece_size;
		char *piece = take_piece(&input, &length);

		feed(&reader, &outcome, piece, length);
		free(piece);
	}
	outcome.idle = frame_idle(&reader);
	frame_clear(&reader);
	return outcome;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	size_t piece = 1 + take_byte(&input);
	struct outcome whole = read_all(input.at, input.left, input.left), cut = read_all(input.at, input.left, piece);

	CHECK(whole.sum == cut.sum && whole.frames == cut.frames);
	CHECK(whole.last == cut.last && whole.idle == cut.idle);
	return 0;
}
