/* POST /sync: everything written to the root disk reaches it before the answer. The host calls it before it keeps a
 * disk without the memory. Nothing else is served meanwhile, so nothing that a client was told is written comes later.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "http.h"

static int sync_root(void)
{
	int fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC), error;

	if (fd < 0)
		return errno;
	error = syncfs(fd) < 0 ? errno : 0;
	close(fd);
	return error;
}

static void sync_disk(struct http_request *req)
{
	int error = sync_root();

	if (error)
		http_reply_error(req, 500, "the disk cannot be written: %s", strerror(error));
	else
		http_reply(req, 204, NULL, NULL, 0);
}

void sync_register(struct envd *envd)
{
	http_route(envd, "POST", "/sync", HTTP_HOST, sync_disk);
}
