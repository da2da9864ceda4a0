#include "frame.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_SIZE = 512, KEPT_SIZE = 4096 };

void frame_init(struct frame_reader *reader, size_t limit)
{
	memset(reader, 0, sizeof *reader);
	reader->limit = limit;
}

void frame_clear(struct frame_reader *reader)
{
	free(reader->data);
	reader->data = NULL;
	reader->size = 0;
}

void frame_next(struct frame_reader *reader)
{
	reader->have = reader->got = reader->len = 0;
	if (reader->size > KEPT_SIZE)
		frame_clear(reader);
}

int frame_idle(const struct frame_reader *reader)
{
	return reader->have == 0;
}

static enum frame_status read_head(struct frame_reader *reader, const char *data, size_t len, size_t *taken)
{
	size_t n = FRAME_HEAD - reader->have;

	if (n > len)
		n = len;
	memcpy(reader->head + reader->have, data, n);
	reader->have += n;
	*taken = n;
	if (reader->have < FRAME_HEAD)
		return FRAME_MORE;
	reader->len = (size_t)reader->head[1] << 24 | (size_t)reader->head[2] << 16 | (size_t)reader->head[3] << 8 |
		      reader->head[4];
	if (reader->head[0] & ~FRAME_END)
		return FRAME_BAD_FLAGS;
	return reader->len > reader->limit ? FRAME_TOO_LARGE : FRAME_READY;
}

/* Memory grows with what has come, not with what the head promises. */
static int make_room(struct frame_reader *reader, size_t more)
{
	size_t size = reader->size ? reader->size : FIRST_SIZE;
	char *data;

	while (size < reader->got + more)
		size *= 2;
	if (size == reader->size)
		return 1;
	data = realloc(reader->data, size);
	if (!data)
		return 0;
	reader->data = data;
	reader->size = size;
	return 1;
}

enum frame_status frame_read(struct frame_reader *reader, const char *data, size_t len, size_t *taken)
{
	size_t n;

	*taken = 0;
	if (reader->have < FRAME_HEAD) {
		enum frame_status status = read_head(reader, data, len, taken);

		if (status != FRAME_READY)
			return status;
		data += *taken;
		len -= *taken;
	}
	n = reader->len - reader->got;
	if (n > len)
		n = len;
	if (!make_room(reader, n))
		return FRAME_NO_MEMORY;
	memcpy(reader->data + reader->got, data, n);
	reader->got += n;
	*taken += n;
	return reader->got == reader->len ? FRAME_READY : FRAME_MORE;
}

void frame_head(uint8_t out[FRAME_HEAD], uint8_t flags, size_t len)
{
	out[0] = flags;
	out[1] = (uint8_t)(len >> 24);
	out[2] = (uint8_t)(len >> 16);
	out[3] = (uint8_t)(len >> 8);
	out[4] = (uint8_t)len;
}
