#include "gunzip.h"

#include <stdlib.h>
#include <zlib.h>

#define GZIP_WINDOW (15 + 16) /* zlib's way to say: gzip, not zlib, header and trailer, which are checked */

struct gunzip {
	z_stream stream;
	bool complete;
};

struct gunzip *gunzip_new(void)
{
	struct gunzip *gunzip = calloc(1, sizeof *gunzip);

	if (gunzip && inflateInit2(&gunzip->stream, GZIP_WINDOW) != Z_OK) {
		free(gunzip);
		return NULL;
	}
	return gunzip;
}

enum gunzip_result gunzip_run(struct gunzip *gunzip, const char **in, size_t *in_length, char *out, size_t *out_length)
{
	z_stream *stream = &gunzip->stream;

	/* A gzip file may consist of several members (RFC 1952, 2.2). */
	if (gunzip->complete && *in_length > 0) {
		inflateReset(stream);
		gunzip->complete = false;
	}
	if (gunzip->complete) {
		*out_length = 0;
		return GUNZIP_MORE;
	}
	stream->next_in = (Bytef *)*in;
	stream->avail_in = *in_length;
	stream->next_out = (Bytef *)out;
	stream->avail_out = *out_length;
	int result = inflate(stream, Z_NO_FLUSH);
	*in = (const char *)stream->next_in;
	*in_length = stream->avail_in;
	*out_length -= stream->avail_out;
	gunzip->complete = result == Z_STREAM_END;
	if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR)
		return GUNZIP_BROKEN;
	return stream->avail_out == 0 || *in_length > 0 ? GUNZIP_OUTPUT : GUNZIP_MORE;
}

bool gunzip_complete(const struct gunzip *gunzip)
{
	return gunzip->complete;
}

void gunzip_free(struct gunzip *gunzip)
{
	inflateEnd(&gunzip->stream);
	free(gunzip);
}
