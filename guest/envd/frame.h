/* Connect stream frames: 1 flag byte, 4 bytes big-endian length, payload. No I/O: easily fuzzed. */
#ifndef ENVD_FRAME_H
#define ENVD_FRAME_H

#include <stddef.h>
#include <stdint.h>

enum {
	FRAME_HEAD = 5,
	FRAME_COMPRESSED = 0x01,
	FRAME_END = 0x02, /* last frame of a response; carries {} or {"error": ...} */
};

enum frame_status {
	FRAME_MORE,      /* all input taken, the frame is not complete */
	FRAME_READY,     /* reader->data holds reader->len bytes; frame_next() before reading on */
	FRAME_TOO_LARGE,
	FRAME_BAD_FLAGS, /* compressed, or flags that the protocol does not know */
	FRAME_NO_MEMORY,
};

struct frame_reader {
	uint8_t head[FRAME_HEAD];
	size_t have;         /* bytes of the head */
	char *data;
	size_t len, got, size;
	size_t limit;        /* longest payload */
};

void frame_init(struct frame_reader *reader, size_t limit);
void frame_clear(struct frame_reader *reader);
/* Takes input up to the end of one frame; *taken says how much. */
enum frame_status frame_read(struct frame_reader *reader, const char *data, size_t len, size_t *taken);
void frame_next(struct frame_reader *reader);
/* True between frames: here a stream may end. */
int frame_idle(const struct frame_reader *reader);
void frame_head(uint8_t out[FRAME_HEAD], uint8_t flags, size_t len);

#endif
