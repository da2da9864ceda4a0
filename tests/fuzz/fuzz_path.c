/* Paths of clients: whatever they send, the result is absolute, short enough and clean where cleaning is promised. */
#include <limits.h>

#include "fuzz.h"
#include "path.h"

static void check_clean(const char *path)
{
	CHECK(path[0] == '/');
	if (path[1] == 0)
		return;
	while (*path) {
		size_t length;

		CHECK(*path++ == '/');
		length = strcspn(path, "/");
		CHECK(length > 0);
		CHECK(!(length == 1 && path[0] == '.') && !(length == 2 && path[0] == '.' && path[1] == '.'));
		path += length;
	}
}

static void check_parts(const char *path)
{
	char base[PATH_MAX], trimmed[PATH_MAX], joined[PATH_MAX];

	path_base(path, base);
	CHECK(base[0] && (!strchr(base, '/') || strcmp(base, "/") == 0));
	strcpy(trimmed, path);
	path_trim(trimmed);
	CHECK(strncmp(trimmed, path, strlen(trimmed)) == 0);
	CHECK(trimmed[1] == 0 || trimmed[strlen(trimmed) - 1] != '/');
	if (path_join(path, base, joined))
		CHECK(strlen(joined) < PATH_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	uint8_t choice = take_byte(&input);
	char *workdir = take_text(&input, choice & 1 ? take_byte(&input) : 0);
	size_t length = input.left;
	char *raw = take_text(&input, length), out[PATH_MAX];
	enum path_status status = path_resolve(raw, length, choice & 2 ? "/" : "/home/user", workdir, out);

	CHECK(path_status_text(status)[0]);
	if (status == PATH_OK) {
		CHECK(out[0] == '/' && strlen(out) < PATH_MAX);
		CHECK(!memchr(raw, 0, length));
		if (length > 0 && raw[0] != '/')
			check_clean(out);
		check_parts(out);
	}
	free(workdir);
	free(raw);
	return 0;
}
