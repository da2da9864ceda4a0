/* Messages of every method: the input is JSON, the HTTP around it is right. Lines are messages; the first byte of a line
 * says which method gets it. A stream stays open on a client of its own, so that later lines find its process. */
#include "fuzz.h"
#include "world.h"

enum kind { UNARY, STREAM, PLAIN };

static const struct method {
	char letter;
	enum kind kind;
	const char *path;
} METHODS[] = {
	{'S', STREAM, "/process.Process/Start"},
	{'C', STREAM, "/process.Process/Connect"},
	{'T', STREAM, "/process.Process/StreamInput"},
	{'L', UNARY, "/process.Process/List"},
	{'U', UNARY, "/process.Process/Update"},
	{'I', UNARY, "/process.Process/SendInput"},
	{'K', UNARY, "/process.Process/SendSignal"},
	{'E', UNARY, "/process.Process/CloseStdin"},
	{'s', UNARY, "/filesystem.Filesystem/Stat"},
	{'m', UNARY, "/filesystem.Filesystem/MakeDir"},
	{'v', UNARY, "/filesystem.Filesystem/Move"},
	{'l', UNARY, "/filesystem.Filesystem/ListDir"},
	{'r', UNARY, "/filesystem.Filesystem/Remove"},
	{'c', UNARY, "/filesystem.Filesystem/CreateWatcher"},
	{'g', UNARY, "/filesystem.Filesystem/GetWatcherEvents"},
	{'x', UNARY, "/filesystem.Filesystem/RemoveWatcher"},
	{'w', STREAM, "/filesystem.Filesystem/WatchDir"},
	{'i', PLAIN, "/init"},
	{'f', PLAIN, "/files/compose"},
};

static const struct method *find(char letter)
{
	size_t i;

	for (i = 0; i < sizeof METHODS / sizeof *METHODS; i++)
		if (METHODS[i].letter == letter)
			return &METHODS[i];
	return NULL;
}

/* Unary calls share client 0; streams take turns on the others, and cut off what was there. */
static void call(struct world *world, const struct method *method, const char *message, size_t length, unsigned *stream)
{
	unsigned client = 0;
	size_t body = method->kind == STREAM ? length + 5 : length;
	char *request = malloc(body + 512);
	int used;

	CHECK(request);
	if (method->kind == STREAM) {
		client = 1 + (*stream)++ % 2;
		world_close(world, client);
	}
	used = sprintf(request, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/%sjson\r\nContent-Length: %zu\r\n\r\n",
		       method->path, method->kind == STREAM ? "connect+" : "", body);
	if (method->kind == STREAM) {
		char head[5] = {0, (char)(length >> 24), (char)(length >> 16), (char)(length >> 8), (char)length};

		memcpy(request + used, head, sizeof head);
		used += (int)sizeof head;
	}
	memcpy(request + used, message, length);
	world_send(world, client, request, (size_t)used + length);
	free(request);
}

static void happen(struct world *world, char letter)
{
	switch (letter) {
	case '1': world_process_write(world, false, 10); break;
	case '2': world_process_write(world, true, 60000); break;
	case '3': world_process_end(world, 0); break;
	case '4': world_process_end(world, 9); break;
	case '5': world_process_close(world); break;
	case '6': world_process_read(world); break;
	case '7': world_set_reading(world, 1, false); break;
	case '8': world_set_reading(world, 1, true); break;
	case '9': world_close(world, 1); break;
	case '0': world_hurry(world); break;
	default: break;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	struct world *world = world_new();
	unsigned stream = 0;

	while (input.left > 0) {
		char letter = (char)take_byte(&input);
		const struct method *method = find(letter);
		const uint8_t *end = memchr(input.at, '\n', input.left);
		size_t length = end ? (size_t)(end - input.at) : input.left;
		char *message = take_piece(&input, &length);

		take_byte(&input); /* the line's end */
		if (method)
			call(world, method, message, length, &stream);
		else
			happen(world, letter);
		free(message);
	}
	world_free(world);
	return 0;
}
