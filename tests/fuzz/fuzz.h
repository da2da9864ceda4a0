/* What every fuzz target needs: the input cut into pieces that have their own allocations, so that AddressSanitizer
 * sees each byte that is read outside of them. */
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* An invariant of the code under test. */
#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: violated: %s\n", __FILE__, __LINE__, #condition); \
			abort(); \
		} \
	} while (0)

struct input {
	const uint8_t *at;
	size_t left;
};

static inline uint8_t take_byte(struct input *input)
{
	if (input->left == 0)
		return 0;
	input->left--;
	return *input->at++;
}

/* The next `size` bytes or what is left, malloc'ed with nothing behind them; *size says how many. */
static inline char *take_piece(struct input *input, size_t *size)
{
	char *piece;

	if (*size > input->left)
		*size = input->left;
	piece = malloc(*size ? *size : 1);
	CHECK(piece);
	memcpy(piece, input->at, *size);
	input->at += *size;
	input->left -= *size;
	return piece;
}

/* The same with NUL behind it. */
static inline char *take_text(struct input *input, size_t size)
{
	char *piece = take_piece(input, &size), *text = malloc(size + 1);

	CHECK(text);
	memcpy(text, piece, size);
	text[size] = 0;
	free(piece);
	return text;
}

#endif
