-- Which submitted lines were refused, by which rule?
SELECT at, tenant, line, field, reason, excerpt
FROM rejections
WHERE because IS NULL   -- others were refused only because of another line of their message
ORDER BY at DESC
LIMIT 50;
