/* A gzip body gives the same bytes and the same verdict however it is cut, in a bounded number of steps. */
#include "fuzz.h"
#include "gunzip.h"

enum { MAX_OUT = 1 << 20, ROOM = 4096 };

struct outcome {
	uint64_t sum;
	size_t length;
	bool broken, complete;
};

static struct outcome decompress(const uint8_t *data, size_t size, size_t piece_size, size_t room)
{
	struct outcome outcome = {14695981039346656037u, 0, false, false};
	struct input input = {data, size};
	struct gunzip *gunzip = gunzip_new();
	char *out = malloc(room);
	size_t steps = 0;

	CHECK(gunzip && out);
	while (input.left > 0 && !outcome.broken && outcome.length < MAX_OUT) {
		size_t length = piece_size;
		char *piece = take_piece(&input, &length);
		const char *at = piece;
		enum gunzip_result result;

		do {
			size_t produced = room, i;

			result = gunzip_run(gunzip, &at, &length, out, &produced);
			CHECK(produced <= room && ++steps < 8 * (size + MAX_OUT));
			for (i = 0; i < produced; i++)
				outcome.sum = (outcome.sum ^ (uint8_t)out[i]) * 1099511628211u;
			outcome.length += produced;
		} while (result == GUNZIP_OUTPUT && outcome.length < MAX_OUT);
		CHECK(result != GUNZIP_MORE || length == 0);
		outcome.broken = result == GUNZIP_BROKEN;
		free(piece);
	}
	outcome.complete = gunzip_complete(gunzip);
	gunzip_free(gunzip);
	free(out);
	return outcome;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	size_t piece = 1 + take_byte(&input), room = 1 + take_byte(&input) * 16;
	struct outcome whole = decompress(input.at, input.left, input.left, ROOM);
	struct outcome cut = decompress(input.at, input.left, piece, room);

	if (whole.length < MAX_OUT && cut.length < MAX_OUT) {
		CHECK(whole.broken == cut.broken && whole.complete == cut.complete);
		/* What a damaged stream gives before the damage depends on the cuts. */
		if (!whole.broken)
			CHECK(whole.length == cut.length && whole.sum == cut.sum);
	}
	return 0;
}
