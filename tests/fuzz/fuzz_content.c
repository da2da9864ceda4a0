/* Headers of /files: ranges lie within the file, dates and names come out as headers that end where they should. */
#include <limits.h>

#include "content.h"
#include "fuzz.h"

static void check_range(struct input *input)
{
	uint64_t size = 0, start, length;
	char *header;
	int i;

	for (i = 0; i < 8; i++)
		size = size << 8 | take_byte(input);
	size >>= take_byte(input) % 64;
	header = take_text(input, input->left);
	if (content_range(header, size, &start, &length) == RANGE_PART) {
		CHECK(length > 0 && start < size && length <= size - start);
	}
	free(header);
}

static void check_codings(struct input *input)
{
	char *header = take_text(input, input->left);
	struct content_codings codings = content_codings(header);

	CHECK(!codings.wants_gzip || codings.gzip);
	CHECK(!codings.wants_identity || codings.identity);
	free(header);
}

static void check_date(struct input *input)
{
	char *header = take_text(input, input->left), text[CONTENT_DATE_MAX];
	time_t when, again;

	if (content_date(header, &when)) {
		content_date_text(when, text);
		CHECK(content_date(text, &again));
		CHECK(again == when);
	}
	free(header);
}

static void check_name(struct input *input)
{
	char *name = take_text(input, NAME_MAX), out[CONTENT_DISPOSITION_MAX];
	size_t length = input->left;
	char *sample = take_piece(input, &length);
	const char *at;

	content_disposition(name, out);
	CHECK(strncmp(out, "inline; filename", 16) == 0);
	for (at = out; *at; at++)
		CHECK(*at >= 0x20 && *at < 0x7F);
	content_compressible(content_type(name, sample, length));
	free(name);
	free(sample);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static void (*const checks[])(struct input *input) = {check_range, check_codings, check_date, check_name};
	struct input input = {data, size};

	checks[take_byte(&input) % 4](&input);
	return 0;
}
