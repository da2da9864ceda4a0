/* Decompression of a gzip body that arrives in pieces, a bounded amount at a time. */
#ifndef ENVD_GUNZIP_H
#define ENVD_GUNZIP_H

#include <stdbool.h>
#include <stddef.h>

struct gunzip;

enum gunzip_result {
	GUNZIP_MORE,   /* all input is taken */
	GUNZIP_OUTPUT, /* the output buffer is full, or a member has ended: call again, even without input */
	GUNZIP_BROKEN, /* not gzip, or damaged */
};

struct gunzip *gunzip_new(void);
/* Takes from *in (*in_length bytes) and fills `out`; *out_length comes as its size and goes as what was written. */
enum gunzip_result gunzip_run(struct gunzip *gunzip, const char **in, size_t *in_length, char *out, size_t *out_length);
/* True at the end of a member: the body may end here. */
bool gunzip_complete(const struct gunzip *gunzip);
void gunzip_free(struct gunzip *gunzip);

#endif
